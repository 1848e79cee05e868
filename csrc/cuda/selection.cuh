// The kernels that select and accumulate_select share; see selection.h.

#pragma once

#include "at_once.cuh"
#include "candidates.cuh"
#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

// GPUs from compute capability 7.0 on, as all that can copy asynchronously, have 64 KiB for a block.
static_assert(sizeof(Search<kAloneThreads>) + kHeldBytes <= 63 * 1024, "and other variables have to fit too");

// Two such blocks share a multiprocessor, for most tensors have little to read: where it has twice their shared memory,
// as on an A100 or H100, not on a T4.
constexpr int kDigitThreads = 512;

template <class Keys>
__global__ void __launch_bounds__(kDigitThreads, 2) find_first_digits(Bucket bucket, Keys keys) {
  __shared__ Search<kDigitThreads> search;
  search.begin();
  wait_for_previous();
  find_first_digit<kDigitThreads>(bucket, keys, static_cast<int32_t>(blockIdx.x), search);
}

template <class Keys>
__global__ void __launch_bounds__(kDigitThreads, 2) find_next_digits(Bucket bucket, Keys keys, uint32_t digits) {
  wait_for_previous();
  __shared__ Search<kDigitThreads> search;
  find_next_digit<kDigitThreads>(bucket, keys, static_cast<int32_t>(blockIdx.x), search, digits);
}

// Blocks that write positions and share a multiprocessor, for it is waiting that takes their time. Six were faster on
// an H100, though some registers are then kept in memory; on others it has not been measured, and four need nothing of
// that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWriters = 4;
#else
constexpr int kWriters = 6;
#endif

// A block a strip, then a block a tensor for what is kept of it.
template <class Keys>
__global__ void __launch_bounds__(kThreads, kWriters) write_positions(Bucket bucket, Keys keys) {
  wait_for_previous();
  const int32_t turn = take_turn(bucket.begun), strips = bucket.parts.strips;
  if (turn < strips) {
    return write_strip<kThreads>(bucket, keys, turn, [&](const Strip& strip) {
      const Progress& progress = bucket.progress[strip.i];
      return !progress.recollect || progress.collected <= static_cast<uint32_t>(strip.part.room);
    });
  }
  const int32_t i = turn - strips;
  if (threadIdx.x == 0 && bucket.hints && bucket.parts.rows[i].count > 0) remember(bucket, i, Outlook(bucket, i));
}

// Selects by `keys`, among the candidates that are in the slots where these serve.
template <class Keys>
void select_collected(cudaStream_t stream, const Bucket& bucket, const Keys& keys) {
  const int64_t tensors = bucket.parts.count, strips = bucket.parts.strips, shares = bucket.parts.shares;
  if (bucket.at_once) {
    return launch<kAloneThreads, kHeldBytes>(stream, kDigits * shares + strips + tensors, select_at_once<Keys>, bucket,
                                             keys);
  }
  launch<kDigitThreads, kHeldBytes>(stream, shares, find_first_digits<Keys>, bucket, keys);
  launch(stream, strips, recollect<Keys>, bucket, keys);
  for (uint32_t digits = 1; digits < kDigits; ++digits) {
    launch<kDigitThreads, kHeldBytes>(stream, shares, find_next_digits<Keys>, bucket, keys, digits);
  }
  launch(stream, strips + tensors, write_positions<Keys>, bucket, keys);
}

}  // namespace ringprune::cuda
