// All of a small bucket's selection in one kernel, for launches take longer than work there. Blocks wait for others
// that have begun before them, so it does not matter how many run at a time.

#pragma once

#include "digits.cuh"
#include "positions.cuh"

namespace ringprune::cuda {

// Counts of strips as other blocks may read them, once they are there.
class Announced {
 public:
  __device__ explicit Announced(Counts* counts) : counts_(counts) {}

  // In one access, so that nobody sees a part of it.
  __device__ void announce(int32_t strip, Counts counts) const { write_now(counts_[strip], counts | kThere); }

  // This thread's part of the sum over that many; it waits for those that are not there yet.
  __device__ Counts some_of(int32_t strips) const {
    Counts sum = 0;
    for (int32_t strip = threadIdx.x; strip < strips; strip += kDigitThreads) {
      Counts counts = 0;
      while (counts == 0) counts = read_now(counts_[strip]);
      sum += counts & ~kThere;
    }
    return sum;
  }

 private:
  static constexpr Counts kThere = Counts{1} << 63;
  Counts* counts_;
};

// Writes the positions of a strip, the `number`-th of all, as soon as its tensor's threshold is known.
template <class Keys>
__device__ void write_strip(const Bucket& bucket, const Keys& keys, int32_t number) {
  const Strip strip(bucket.parts, number);
  const Part& part = strip.part;
  if (part.count == 0) return;
  const Source source = first_source(bucket, part, hint_of(bucket, strip.i), bucket.progress[strip.i].found);
  const Selected<Keys, kDigitThreads> selected(bucket, strip, keys, source.slots);
  const Counts up_to = selected.count();
  const Announced announced(bucket.strip_counts + part.first_strip);
  if (threadIdx.x == kLanes - 1) announced.announce(strip.me, up_to);
  Counts before_strip;
  block_scan<kDigitThreads>(announced.some_of(strip.me), before_strip);
  selected.write([&](int k) {
    const int tile = selected.tiles.number(k);
    const Counts before = __shfl_sync(kAllLanes, up_to, max(tile - 1, 0));
    return before_strip + (tile > 0 ? before : 0);
  });
}

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
  Announced(bucket.strip_counts + part.first_strip).some_of(strips_of(part));
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t digit_blocks = kDigits * static_cast<uint32_t>(bucket.parts.shares);
  while (read_now(*bucket.left) < digit_blocks) {
  }
  wait_for_digits(bucket.progress[i], kDigits);
  remember(bucket, i);
}

// For each digit a block a share, then a block a strip, then a block a tensor.
template <class Keys>
__global__ void __launch_bounds__(kDigitThreads, 1) select_at_once(Bucket bucket, Keys keys) {
  __shared__ Search search;
  search.begin();
  wait_for_previous();
  const int32_t shares = bucket.parts.shares, strips = bucket.parts.strips, digits = kDigits * shares;
  const int32_t turn = take_turn(bucket.begun);
  if (turn >= digits + strips) return finish(bucket, turn - digits - strips);
  if (turn >= digits) return write_strip(bucket, keys, turn - digits);
  if (turn < shares) {
    find_first_digit(bucket, keys, turn, search);
  } else {
    find_next_digit(bucket, keys, turn % shares, search, static_cast<uint32_t>(turn / shares));
  }
  leave(bucket);
}

}  // namespace ringprune::cuda
