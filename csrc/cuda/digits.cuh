// Radix select: the threshold of every tensor, digit by digit from the top, from histograms of the next digit of the
// keys that agree with the digits found so far.

#pragma once

#include "hints.cuh"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {

constexpr uint32_t kShare = 8 * kThreads;  // slots that are worth a block of their own

template <int kDigit>
struct Digit {  // 11, 11 and 9 of the 31 bits
  static constexpr int kShift = kDigit == 0 ? 20 : kDigit == 1 ? 9 : 0;
  static constexpr uint32_t kKnown = kDigit == 0 ? 0u : kDigit == 1 ? ~0u << 20 : ~0u << 9;
};

// The keys a tensor's threshold is looked for in: its slots, or where they do not serve all of its entries.
struct Source {
  bool slots;
  uint32_t size;  // of the slots

  // How many blocks share the work; the tensor's others have nothing to do.
  __device__ uint32_t workers(const Part& part) const {
    const auto strips = static_cast<uint32_t>(strips_of(part));
    return slots ? min(max(ceil_div(size, kShare), 1u), strips) : strips;
  }
};

// Before anything is decided: what the first pass has left.
__device__ inline Source first_source(const Bucket& bucket, int32_t i) {
  const uint32_t found = bucket.progress[i].found;
  return {serves(bucket.parts.rows[i], floor_of(bucket, i), found), found};
}

// After the first digit.
__device__ inline Source source_of(const Part& part, const Progress& progress) {
  const uint32_t size = progress.recollect ? progress.collected : progress.found;
  return {size <= static_cast<uint32_t>(part.room), size};
}

// Calls body(key) for the keys that fall to block `me`, in any order.
template <class Keys, class Body>
__device__ void for_each_key(const Bucket& bucket, const Part& part, const Keys& keys, const Source& source,
                             uint32_t me, const Body& body) {
  if (source.slots) {
    const uint64_t size = source.size, workers = source.workers(part);
    const uint32_t* slots = bucket.keys + part.first_slot;
    const auto end = static_cast<uint32_t>(size * (me + 1) / workers);
#pragma unroll 4
    for (auto i = static_cast<uint32_t>(size * me / workers) + threadIdx.x; i < end; i += kThreads) body(slots[i]);
  } else {
    const int64_t begin = static_cast<int64_t>(me) * kStrip;
#pragma unroll 2
    for (int turn = 0; turn < kStrip; turn += 4 * kThreads) {
      const int64_t i = begin + turn + 4 * threadIdx.x;
      const Quad<uint32_t> quad = keys.load(part, i, part.entries - i);
      for (int e = 0; e < 4; ++e) body(quad.v[e]);
    }
  }
}

// Adds the block's histogram to the tensor's; the last block of all then has the whole, and leaves zeros behind.
__device__ inline bool merge(uint32_t (&histogram)[kBins], uint32_t* whole, uint32_t* arrived, uint32_t blocks) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (histogram[bin] != 0u) atomicAdd(&whole[bin], histogram[bin]);
  }
  if (!arrives_last(arrived, blocks)) return false;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = atomicExch(&whole[bin], 0u);
  return true;
}

// The bin in which the entry of some rank is, counted from the top, and how many are in the bins above.
struct Place {
  uint32_t bin;
  uint32_t above;
};

// Each thread has the eight bins below those of the thread before it.
constexpr int kBinsEach = kBins / kThreads;

// Called with the sum over the bins of the threads before and with its own; the one that has the rank writes `place`.
__device__ inline void locate(const uint32_t (&histogram)[kBins], uint32_t before, uint32_t own, uint32_t rank,
                              Place& place) {
  if (rank <= before || rank > before + own) return;
  uint32_t bin = kBins - 1 - threadIdx.x * kBinsEach;
  for (; before + histogram[bin] < rank; --bin) before += histogram[bin];
  place = {bin, before};
}

// The key at a rank, were the keys of its bin spread evenly. `least` is below none of those counted.
__device__ inline uint32_t interpolate(const Place& place, uint32_t rank, uint32_t in_bin, uint32_t least) {
  const uint32_t low = max(place.bin << Digit<0>::kShift, least);
  const uint32_t high = (place.bin + 1) << Digit<0>::kShift;
  return low + static_cast<uint32_t>(uint64_t{high - low} * (place.above + in_bin - rank) / in_bin);
}

// Decides after the first digit where the others look, and the next hint. `hint` is the place of rank `next`.
__device__ inline void decide(const Bucket& bucket, int32_t i, const Source& source, uint32_t total, uint32_t next,
                              const Place& hint, const uint32_t (&histogram)[kBins]) {
  const auto count = static_cast<uint32_t>(bucket.parts.rows[i].count);
  const uint32_t floor = source.slots ? floor_of(bucket, i) : kAboveZero;
  Progress& progress = bucket.progress[i];
  progress.recollect = !source.slots;
  progress.all = total <= count;
  progress.selected = min(total, count);
  if (next <= total) {
    progress.hint = interpolate(hint, next, histogram[hint.bin], floor);
  } else {  // they are all there are, or the floor was too high to see more
    progress.hint = floor == kAboveZero ? kAboveZero : below(floor);
  }
}

// Finds one digit of the threshold of every tensor. A block a strip; those of a tensor share what there is to read.
template <int kDigit, class Keys>
__global__ void __launch_bounds__(kThreads) find_digit(Bucket bucket, Keys keys) {
  using D = Digit<kDigit>;
  constexpr bool kFirst = kDigit == 0;
  __shared__ uint32_t histogram[kBins];
  __shared__ Place threshold, hint;
  __shared__ uint32_t hinted;
  const int32_t i = find_row(bucket.parts, &Part::first_strip, blockIdx.x);
  const Part& part = bucket.parts.rows[i];
  Progress& progress = bucket.progress[i];
  if (part.count == 0 || (!kFirst && progress.all)) return;
  const Source source = kFirst ? first_source(bucket, i) : source_of(part, progress);
  const uint32_t me = blockIdx.x - static_cast<uint32_t>(part.first_strip), workers = source.workers(part);
  if (me >= workers) return;

  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0u;
  __syncthreads();
  const uint32_t known = kFirst ? 0u : progress.threshold;
  for_each_key(bucket, part, keys, source, me, [&](uint32_t key) {
    if (key != 0u && (key & D::kKnown) == known) atomicAdd(&histogram[(key & ~D::kKnown) >> D::kShift], 1u);
  });
  __syncthreads();
  if (workers > 1u) {
    uint32_t* whole = bucket.histograms + int64_t{part.histogram} * kBins;
    if (!merge(histogram, whole, &progress.arrived, workers)) return;
    __syncthreads();
  }

  uint32_t own = 0, total = 0;
  for (int j = 0; j < kBinsEach; ++j) own += histogram[kBins - 1 - threadIdx.x * kBinsEach - j];
  if (kFirst && threadIdx.x == 0) hinted = hint_rank(bucket, i, !source.slots);
  const uint32_t before = block_scan(own, total);  // no thread passes it before all have come to it
  const uint32_t rank = kFirst ? static_cast<uint32_t>(part.count) : progress.rank;
  const uint32_t next = kFirst ? hinted : 0u;
  locate(histogram, before, own, rank, threshold);
  if (kFirst) locate(histogram, before, own, next, hint);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (kFirst) decide(bucket, i, source, total, next, hint, histogram);
  if (kFirst && progress.all) return;
  progress.threshold = known | threshold.bin << D::kShift;
  progress.rank = rank - threshold.above;
}

}  // namespace ringprune::cuda
