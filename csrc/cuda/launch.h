// How kernels are started: always by this one function, on the caller's stream.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ringprune::cuda {

constexpr int kLanes = 32;  // threads of a warp
constexpr int kWarps = 8;   // warps of a block
constexpr int kThreads = kWarps * kLanes;

// Every kernel begins with this: what was launched before on its stream has ended, and all that it wrote is visible.
// Kernels are launched while those before them still run, so that their start costs no time; the next one may then be
// as soon as all blocks of this one are, so a kernel of somebody else that is launched early too may begin before those
// have waited; it has to wait itself, as they all do. (To read what earlier kernels wrote before waiting, with the next
// launched only afterwards, was slower: what all blocks read has to come past the first cache then.)
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// Whether the current device can launch `kernel` early, and CUDA captures such launches into graphs. The kernel itself
// must have been compiled to wait: an H100 also runs what was compiled for an A100 and came as PTX. Asked once for all
// kernels with the same parameters, which are compiled alike.
template <class... Parameters>
bool launches_early(void (*kernel)(Parameters...)) {
#if CUDART_VERSION >= 12030
  static const bool waits = [&] {
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));  // it may be older than the toolkit
    cudaFuncAttributes attributes{};
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= 90 && driver >= 12030;
  }();
  int device = 0, major = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return waits && major >= 9;
#else
  (void)kernel;
  return false;
#endif
}

// Starts `kernel` on that many blocks, each with so many bytes of shared memory besides its own variables; nothing
// where there are no blocks.
template <int kOfBlock = kThreads, int kShared = 0, class... Parameters, class... Arguments>
void launch(cudaStream_t stream, int64_t blocks, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (blocks == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kOfBlock);
  config.stream = stream;
  config.dynamicSmemBytes = kShared;
  if (kShared > 0) {  // more than a kernel gets unless it is said of it
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  if (launches_early(kernel)) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// How many blocks, warps, tiles... of `size` it takes.
template <class Integer>
C10_HOST_DEVICE constexpr Integer ceil_div(Integer count, Integer size) {
  return (count + size - 1) / size;
}

}  // namespace ringprune::cuda
