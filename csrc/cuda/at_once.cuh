// All of a small bucket's selection in one kernel, for launches take longer than work there. Blocks wait for others
// that have begun before them, so it does not matter how many run at a time.

#pragma once

#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

constexpr int kAloneThreads = 1024;  // of a block that has a multiprocessor to itself

// This block, one of those for the digits, reads no hint any more. All threads together.
__device__ inline void leave(const Bucket& bucket) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(bucket.left, 1u);
}

// Keeps what is to be kept of a tensor when all other blocks have read the hint it had.
__device__ inline void finish(const Bucket& bucket, int32_t i) {
  const Part& part = bucket.parts.rows[i];
  if (part.count == 0 || !bucket.hints) return;
  Outlook outlook;
  if (threadIdx.x == 0) outlook = Outlook(bucket, i);  // takes a while, for which nothing has to wait
  Announced(bucket.strip_counts + part.first_strip).wait<kAloneThreads>(strips_of(part));
  if (threadIdx.x != 0) return;
  const uint32_t digit_blocks = kDigits * static_cast<uint32_t>(bucket.parts.shares);
  while (read_now(*bucket.left) < digit_blocks) {
  }
  wait_for_digits(bucket.progress[i], kDigits);
  remember(bucket, i, outlook);
}

// For each digit a block a share, then a block a strip, then a block a tensor.
template <class Keys>
__global__ void __launch_bounds__(kAloneThreads, 1) select_at_once(Bucket bucket, Keys keys) {
  __shared__ Search<kAloneThreads> search;
  search.begin();
  wait_for_previous();
  const int32_t shares = bucket.parts.shares, strips = bucket.parts.strips, digits = kDigits * shares;
  const int32_t turn = take_turn(bucket.begun);
  if (turn >= digits + strips) return finish(bucket, turn - digits - strips);
  if (turn >= digits) {
    return write_strip<kAloneThreads>(bucket, keys, turn - digits, [&](const Strip& strip) {
      return first_source(bucket, strip.part, hint_of(bucket, strip.i), bucket.progress[strip.i].found).slots;
    });
  }
  if (turn < shares) {
    find_first_digit<kAloneThreads>(bucket, keys, turn, search);
  } else {
    find_next_digit<kAloneThreads>(bucket, keys, turn % shares, search, static_cast<uint32_t>(turn / shares));
  }
  leave(bucket);
}

}  // namespace ringprune::cuda
