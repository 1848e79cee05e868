// How kernels are started: always by this one function, on the caller's stream.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ringprune::cuda {

constexpr int kLanes = 32;  // threads of a warp
constexpr int kWarps = 8;   // warps of a block
constexpr int kThreads = kWarps * kLanes;

// Starts `kernel` on that many blocks of kThreads threads; nothing where there are none.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, int64_t blocks, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (blocks == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// How many blocks, warps, tiles... of `size` it takes.
template <class Integer>
C10_HOST_DEVICE constexpr Integer ceil_div(Integer count, Integer size) {
  return (count + size - 1) / size;
}

}  // namespace ringprune::cuda
