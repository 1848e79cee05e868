// What the threads of a warp or block find out together. Every function is called by all of them at once.

#pragma once

#include <type_traits>

#include "launch.h"

namespace ringprune::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / kLanes; }

// Which warp of the whole grid this is.
__device__ inline int64_t grid_warp() { return static_cast<int64_t>(blockIdx.x) * kWarps + warp(); }

// The lanes before this one.
__device__ inline uint32_t lanes_before() { return (1u << lane()) - 1u; }

template <class T>
__device__ T warp_sum(T value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, uint32_t>) {
    value = __reduce_add_sync(kAllLanes, value);
  } else
#endif
  {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Sum over this lane and those before it.
template <class T>
__device__ T warp_scan(T value) {
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane() >= distance) value += other;
  }
  return value;
}

// Sum over the threads before this one; `total` is that over all. For each T there is a barrier between two calls.
template <int kOfBlock = kThreads, class T>
__device__ T block_scan(T value, T& total) {
  constexpr int kSums = kOfBlock / kLanes;
  __shared__ T sums[kSums];
  const T sum = warp_scan(value);
  if (lane() == kLanes - 1) sums[warp()] = sum;
  __syncthreads();
  const T warps = warp_scan(lane() < kSums ? sums[lane()] : T{0});
  total = __shfl_sync(kAllLanes, warps, kSums - 1);
  const T before = __shfl_sync(kAllLanes, warps, max(warp() - 1, 0));
  return (warp() > 0 ? before : T{0}) + sum - value;
}

// Whether this block is the last of `blocks` to come here, to which all that the others wrote is visible. The counter
// is zero before and afterwards. At most once per kernel.
__device__ inline bool arrives_last(uint32_t* arrived, uint32_t blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1u) + 1u == blocks;
    if (last) *arrived = 0u;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Memory that other blocks write or read while this one runs.
template <class T>
__device__ T read_now(const T& from) {
  return *static_cast<const volatile T*>(&from);
}
template <class T>
__device__ void write_now(T& to, std::type_identity_t<T> value) {
  *static_cast<volatile T*>(&to) = value;
}

// The number of this block in the order in which blocks begin; `begun` counts them, zero before. All threads together,
// at most once per kernel.
__device__ inline int32_t take_turn(uint32_t* begun) {
  __shared__ int32_t turn;
  if (threadIdx.x == 0) turn = static_cast<int32_t>(atomicAdd(begun, 1u));
  __syncthreads();
  return turn;
}

// Adds to a count of 64 bits.
template <class Integer>
__device__ void add_to(Integer* count, std::type_identity_t<Integer> more) {
  static_assert(sizeof(Integer) == sizeof(unsigned long long));
  atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(more));
}

// The same with what all lanes of the warp bring.
__device__ inline void add_all_lanes(int64_t* count, int more) {
  if (!__any_sync(kAllLanes, more)) return;
  more = warp_sum(more);
  if (lane() == 0) add_to(count, more);
}

}  // namespace ringprune::cuda
