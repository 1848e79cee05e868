// The kernels that select and accumulate_select share; see selection.h.

#pragma once

#include "at_once.cuh"
#include "candidates.cuh"
#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

template <class Keys>
__global__ void __launch_bounds__(kDigitThreads) find_first_digits(Bucket bucket, Keys keys) {
  __shared__ Search search;
  search.begin();
  wait_for_previous();
  find_first_digit(bucket, keys, static_cast<int32_t>(blockIdx.x), search);
}

template <class Keys>
__global__ void __launch_bounds__(kDigitThreads) find_next_digits(Bucket bucket, Keys keys, uint32_t digits) {
  wait_for_previous();
  __shared__ Search search;
  find_next_digit(bucket, keys, static_cast<int32_t>(blockIdx.x), search, digits);
}

// Selects by `keys`, among the candidates that are in the slots where these serve.
template <class Keys>
void select_collected(cudaStream_t stream, const Bucket& bucket, const Keys& keys) {
  const int64_t tensors = bucket.parts.count, strips = bucket.parts.strips, shares = bucket.parts.shares;
  if (bucket.at_once) {
    return launch<kDigitThreads>(stream, kDigits * shares + strips + tensors, select_at_once<Keys>, bucket, keys);
  }
  launch<kDigitThreads>(stream, shares, find_first_digits<Keys>, bucket, keys);
  launch(stream, strips, recollect<Keys>, bucket, keys);
  for (uint32_t digits = 1; digits < kDigits; ++digits) {
    launch<kDigitThreads>(stream, shares, find_next_digits<Keys>, bucket, keys, digits);
  }
  launch(stream, strips, count_tiles<Keys>, bucket, keys);
  launch(stream, strips + tensors, write_positions<Keys>, bucket, keys);
}

}  // namespace ringprune::cuda
