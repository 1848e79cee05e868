// As much of CUDA as csrc/cuda uses, on the CPU, so that the very same sources run where there is no GPU.
//
// The folder of this file comes first on the include path, so that its cuda_runtime.h and c10/cuda take the place of
// the real ones. A kernel's blocks run one after another in random order. The threads of a block are fibers: each runs
// until it meets a barrier or an operation of its warp, and goes on when all the others have come there; in what order
// they run is random too. Threads that wait for each other for ever, or meet in different operations, end the process
// with a message. What this cannot show: time, and two blocks that run at once without meeting in an atomic.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block at a time
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}  // implicit, as CUDA has it
  unsigned x, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

extern dim3 threadIdx, blockIdx, gridDim;  // of the fiber that runs

namespace emulation {

enum class Operation { kShuffle, kBallot, kSync };

// Runs body() as every thread of every block, each with so many bytes of shared memory.
void run(unsigned blocks, unsigned threads, size_t shared, const std::function<void()>& body);

// Waits for the other threads of the block.
void wait_for_block();

// Waits for the other lanes of the warp; returns what each of the 32 has brought.
const uint64_t* meet(Operation operation, uint32_t mask, uint64_t value);

template <class T>
T shuffle(uint32_t mask, T value, int from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const uint64_t* words = meet(Operation::kShuffle, mask, word);
  std::memcpy(&value, &words[from], sizeof(T));
  return value;
}

inline int lane() { return static_cast<int>(threadIdx.x % 32); }

// What a kernel is launched with; it is of the block that runs.
extern uint4 shared_memory[];

// Copies to shared memory once this thread waits for it, not before; what was there is gone at once.
void copy_later(void* to, const void* from, size_t size);
void copy_now();

}  // namespace emulation

inline void __syncthreads() { emulation::wait_for_block(); }
inline void __syncwarp(uint32_t mask = ~0u) { emulation::meet(emulation::Operation::kSync, mask, 0); }
inline void __threadfence() {}

inline uint32_t __ballot_sync(uint32_t mask, bool predicate) {
  const uint64_t* votes = emulation::meet(emulation::Operation::kBallot, mask, predicate);
  uint32_t lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= static_cast<uint32_t>(votes[i]) << i;
  return lanes;
}
inline bool __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate != 0) != 0; }

template <class T>
T __shfl_sync(uint32_t mask, T value, int from) {
  return emulation::shuffle(mask, value, from);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return emulation::shuffle(mask, value, emulation::lane() ^ other);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int distance) {
  return emulation::shuffle(mask, value, emulation::lane() - (emulation::lane() < distance ? 0 : distance));
}

inline int __popc(uint32_t word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }

template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
template <class T>
T atomicAdd(T* to, T value) {
  return std::exchange(*to, *to + value);
}
template <class T>
T atomicOr(T* to, T value) {
  return std::exchange(*to, *to | value);
}
template <class T>
T atomicMax(T* to, T value) {
  return std::exchange(*to, std::max(*to, value));
}
template <class T>
T atomicExch(T* to, T value) {
  return std::exchange(*to, value);
}

using cudaStream_t = struct CUstream_st*;
using cudaError_t = int;
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 6;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
  size_t dynamicSmemBytes = 0;
};

constexpr int cudaDevAttrComputeCapabilityMajor = 75;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return 0;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = 9;
  return 0;
}

struct cudaFuncAttributes {
  int ptxVersion;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return attributes->ptxVersion = 90, 0;
}

constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr size_t kSharedUnasked = 48 * 1024;  // what a launch gets without
template <class Kernel>
size_t& most_shared(Kernel* kernel) {
  static std::map<Kernel*, size_t> most;
  return most.try_emplace(kernel, kSharedUnasked).first->second;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, int, int bytes) {
  return most_shared(kernel) = static_cast<size_t>(bytes), 0;
}

// Runs the kernel before it returns.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (config->dynamicSmemBytes > most_shared(kernel)) return 1;
  emulation::run(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes, [&] { kernel(arguments...); });
  return 0;
}
