// The part of selection that select and accumulate_select share; see selection.h.

#pragma once

#include "candidates.cuh"
#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

// Selects by `keys`, among the candidates that are in the slots where these serve.
template <class Keys>
void select_collected(cudaStream_t stream, const Bucket& bucket, const Keys& keys) {
  const int64_t blocks = bucket.parts.strips;
  launch(stream, blocks, find_digit<0, Keys>, bucket, keys);
  launch(stream, blocks, recollect<Keys>, bucket, keys);
  launch(stream, blocks, find_digit<1, Keys>, bucket, keys);
  launch(stream, blocks, find_digit<2, Keys>, bucket, keys);
  launch(stream, blocks, count_tiles<Keys>, bucket, keys);
  launch(stream, blocks, write_positions<Keys>, bucket, keys);
}

}  // namespace ringprune::cuda
