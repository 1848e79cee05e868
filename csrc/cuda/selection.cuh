// The part of selection that select and accumulate_select share; see selection.h.

#pragma once

#include "candidates.cuh"
#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

// Selects by `keys`, among the candidates that are in the slots where these serve.
template <class Keys>
void select_collected(cudaStream_t stream, const Bucket& bucket, const Keys& keys) {
  const int64_t strips = bucket.parts.strips, shares = bucket.parts.shares;
  launch<kDigitThreads>(stream, shares, find_first_digit<Keys>, bucket, keys);
  if (bucket.recollects) launch(stream, strips, recollect<Keys>, bucket, keys);
  for (int digit = 1; digit <= 2 && bucket.finds_next; ++digit) {
    launch<kDigitThreads>(stream, shares, find_next_digit<Keys>, bucket, keys);
  }
  launch(stream, strips + bucket.parts.count, write_positions<Keys>, bucket, keys);
}

}  // namespace ringprune::cuda
