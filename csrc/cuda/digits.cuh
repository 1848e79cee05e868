// Radix select: the threshold of every tensor, from histograms of the keys, each of the bin that the one before found.

#pragma once

#include "hints.cuh"
#include "reading.cuh"
#include "sizes.h"

namespace ringprune::cuda {

static_assert(kFew < 1u << 16, "two numbers of keys share a word");

// Keys from `low` on, 2^bits of them.
struct Range {
  uint32_t low;
  uint32_t bits;

  __device__ bool has(uint32_t key) const { return key != 0u && key - low < 1u << bits; }
  // By how much keys in one bin differ at most, in bits.
  __device__ uint32_t shift() const { return bits > 11u ? bits - 11u : 0u; }
  __device__ uint32_t bin_of(uint32_t key) const { return (key - low) >> shift(); }
  __device__ Range of_bin(uint32_t bin) const { return {low + (bin << shift()), shift()}; }
};

// The first bins, of all keys from a floor on: where candidates are, within three quarters of a power of two of it, so
// narrow that few share one. Without a floor all are the same.
struct FirstBins {
  static constexpr uint32_t kFine = 1536, kFineBits = 12, kCoarseBits = 22, kEqualBits = 20;
  uint32_t floor;

  __device__ bool has(uint32_t key) const { return key != 0u; }
  __device__ uint32_t bin_of(uint32_t key) const {
    if (floor <= kAboveZero) return key >> kEqualBits;
    const uint32_t above = key - floor, fine = above >> kFineBits;
    return fine < kFine ? fine : kFine + ((above - (kFine << kFineBits)) >> kCoarseBits);
  }
  __device__ Range of_bin(uint32_t bin) const {
    if (floor <= kAboveZero) return {bin << kEqualBits, kEqualBits};
    if (bin < kFine) return {floor + (bin << kFineBits), kFineBits};
    return {floor + (kFine << kFineBits) + ((bin - kFine) << kCoarseBits), kCoarseBits};
  }
};

// Adds the block's histogram to the tensor's; the last block of all then has the whole, and leaves zeros behind.
template <int kOfBlock>
__device__ bool merge(uint32_t (&histogram)[kBins], uint32_t* whole, uint32_t* arrived, uint32_t blocks) {
  for (int bin = threadIdx.x; bin < kBins; bin += kOfBlock) {
    if (histogram[bin] != 0u) atomicAdd(&whole[bin], histogram[bin]);
  }
  if (!arrives_last(arrived, blocks)) return false;
  for (int bin = threadIdx.x; bin < kBins; bin += kOfBlock) histogram[bin] = atomicExch(&whole[bin], 0u);
  return true;
}

// The bin in which the entry of some rank is, counted from the top, how many are in the bins above, and in this one.
struct Place {
  uint32_t bin;
  uint32_t above;
  uint32_t size;
};

// What the threads of a block know of their tensor's threshold.
template <int kOfBlock>
struct Search {
  uint32_t histogram[kBins];
  Aim aim;          // of the next hint
  Place hint;       // where that is, if it has a place
  uint32_t total;   // of the keys counted for that
  Range range;      // where the threshold is
  uint32_t rank;    // its, among the keys there
  uint32_t digits;  // that were known
  uint32_t found;
  uint32_t few[kFew];

  // Before keys are counted; then there has to be a barrier.
  __device__ void clear() {
    for (int bin = threadIdx.x; bin < kBins; bin += kOfBlock) histogram[bin] = 0u;
  }
  // Before anything else; likewise.
  __device__ void begin() {
    clear();
    if (threadIdx.x == 0) found = 0u;
  }
};

// Counts the keys that `bins` has. Whether this block then has the histogram of all.
template <class Keys, int kOfBlock, class Bins>
__device__ bool count_keys(const Bucket& bucket, const Worker& worker, const Reading<Keys, kOfBlock>& reading,
                           const Bins& bins, uint32_t (&histogram)[kBins]) {
  reading.for_each([&](uint32_t key) {
    if (bins.has(key)) atomicAdd(&histogram[bins.bin_of(key)], 1u);
  });
  __syncthreads();
  if (worker.workers == 1u) return true;
  uint32_t* whole = bucket.histograms + int64_t{worker.part.histogram} * kBins;
  if (!merge<kOfBlock>(histogram, whole, &bucket.progress[worker.i].arrived, worker.workers)) return false;
  __syncthreads();
  return true;
}

// Ranks of a histogram. Each thread has the bins below those of the thread before it.
template <int kOfBlock>
class Ranks {
 public:
  __device__ explicit Ranks(const uint32_t (&histogram)[kBins]) : histogram_(histogram) {
    for (int j = 0; j < kEach; ++j) own_ += histogram[kBins - 1 - threadIdx.x * kEach - j];
    before_ = block_scan<kOfBlock>(own_, total_);
  }

  // How many keys were counted.
  __device__ uint32_t total() const { return total_; }

  // Whether the entry of that rank is in this thread's bins; of all threads it is one, or none.
  __device__ bool locate(uint32_t rank, Place& place) const {
    if (rank <= before_ || rank > before_ + own_) return false;
    place = {kBins - 1 - threadIdx.x * kEach, before_, 0u};
    for (; place.above + histogram_[place.bin] < rank; --place.bin) place.above += histogram_[place.bin];
    place.size = histogram_[place.bin];
    return true;
  }

 private:
  static constexpr int kEach = kBins / kOfBlock;
  const uint32_t (&histogram_)[kBins];
  uint32_t before_, own_ = 0, total_;
};

// The key at a rank, were the keys of its bin spread evenly. `least` is below none of those counted.
__device__ inline uint32_t interpolate(const Range& bin, const Place& place, uint32_t rank, uint32_t least) {
  const uint32_t low = max(bin.low, least), high = min(bin.low + (1u << bin.bits), kNaNKey + 1u);
  return low + static_cast<uint32_t>(uint64_t{high - low} * (place.above + place.size - rank) / place.size);
}

// Finds the first bin of a tensor's threshold, and where the next hint is. Whether it was this block that found them.
// The histogram is clear, the aim is known.
template <class Keys, int kOfBlock>
__device__ bool find_first_bin(const Bucket& bucket, const Worker& worker, const Reading<Keys, kOfBlock>& reading,
                               const FirstBins& bins, Search<kOfBlock>& search, Progress& progress) {
  const auto count = static_cast<uint32_t>(worker.part.count);
  if (!count_keys(bucket, worker, reading, bins, search.histogram)) return false;
  const Ranks<kOfBlock> ranks(search.histogram);
  const uint32_t total = ranks.total();
  Place place;
  if (total > count && ranks.locate(count, place)) {
    search.range = bins.of_bin(place.bin);
    search.rank = count - place.above;
  }
  if (ranks.locate(search.aim.rank, place)) search.hint = place;
  if (threadIdx.x == 0) {
    if (total <= count) {
      search.range = {0u, 0u};
      search.rank = 0u;
    }
    search.total = total;
    progress.recollect = !worker.source.slots;
    progress.all = total <= count;
    progress.selected = min(total, count);
  }
  __syncthreads();
  return true;
}

// The next hint, when its place is known, and the threshold, or a bin of it.
template <int kOfBlock>
__device__ uint32_t next_hint(const Search<kOfBlock>& search, const FirstBins& bins, uint32_t count) {
  const uint32_t rank = search.aim.rank;
  if (rank <= search.total) return interpolate(bins.of_bin(search.hint.bin), search.hint, rank, bins.floor);
  // they are all there are, or the floor was too high to see more
  return hint_below(bins.floor, search.total, search.range.low, count, rank);
}

// Finds the next bin, within the range that is known. The histogram is clear. Whether it was this block that found it.
template <class Keys, int kOfBlock>
__device__ bool find_next_bin(const Bucket& bucket, const Worker& worker, const Reading<Keys, kOfBlock>& reading,
                              Search<kOfBlock>& search) {
  const Range range = search.range;
  const uint32_t rank = search.rank;
  if (!count_keys(bucket, worker, reading, range, search.histogram)) return false;
  Place place;
  if (Ranks<kOfBlock>(search.histogram).locate(rank, place)) {
    search.range = range.of_bin(place.bin);
    search.rank = rank - place.above;
  }
  __syncthreads();
  return true;
}

// Finds the threshold where few keys are left, for a block that sees all of them; whether it has. `found` is zero.
template <class Keys, int kOfBlock>
__device__ bool find_among_few(const Reading<Keys, kOfBlock>& reading, Search<kOfBlock>& search) {
  const Range range = search.range;
  const uint32_t rank = search.rank;
  reading.for_each([&](uint32_t key) {
    if (!range.has(key)) return;
    const uint32_t place = atomicAdd(&search.found, 1u);
    if (place < kFew) search.few[place] = key;
  });
  __syncthreads();
  const uint32_t found = search.found;
  if (found > kFew) return false;
  for (uint32_t i = warp(); i < found; i += kOfBlock / kLanes) {  // a warp compares one with all
    const uint32_t key = search.few[i];
    uint32_t counts = 0;  // of those above, and in the upper half of those equal
#pragma unroll 4
    for (uint32_t j = lane(); j < found; j += kLanes) {
      const uint32_t other = search.few[j];
      counts += (other > key ? 1u : 0u) + (other == key ? 1u << 16 : 0u);
    }
    counts = warp_sum(counts);
    const uint32_t above = counts & 0xffffu, equal = counts >> 16;
    if (lane() == 0 && above < rank && rank <= above + equal) {  // of equal ones all write the same
      search.range = {key, 0u};
      search.rank = rank - above;
    }
  }
  __syncthreads();
  return true;
}

// Finds the rest of a threshold, for a block that sees all keys.
template <class Keys, int kOfBlock>
__device__ void find_rest(const Bucket& bucket, const Worker& alone, const Reading<Keys, kOfBlock>& reading,
                          Search<kOfBlock>& search) {
  if (search.range.bits == 0u || find_among_few(reading, search)) return;
  for (uint32_t digits = 1; digits < kDigits && search.range.bits > 0u; ++digits) {
    search.clear();
    __syncthreads();
    find_next_bin(bucket, alone, reading, search);
  }
}

// Waits until so many digits are known, and what belongs to them can be read. How many there are.
__device__ inline uint32_t wait_for_digits(const Progress& progress, uint32_t digits) {
  uint32_t known = 0;
  while (known < digits) known = read_now(progress.digits);
  __threadfence();
  return known;
}

// What other blocks are told, and wait for where they run beside this one. Most need no more than the outcome; what one
// thread does meanwhile takes longer than to find it. After the last digit there is an outcome whatever was found: were
// tensors changed by others between two readings, positions would be wrong, but nobody waits for ever.
template <int kOfBlock, class Meanwhile>
__device__ void conclude(const Search<kOfBlock>& search, Progress& progress, uint32_t digits,
                         const Meanwhile& meanwhile) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool done = search.range.bits == 0u || digits == kDigits;
  if (done) write_now(progress.outcome, outcome_of(search.range.low, search.rank));
  meanwhile();
  progress.threshold = search.range.low;
  progress.bits = search.range.bits;
  progress.rank = search.rank;
  __threadfence();
  write_now(progress.digits, done ? kDigits : digits);
}

// Finds the first bin of a tensor's threshold, and where there is little to read the threshold. Blocks of a tensor
// share what there is to read; `share` is which of all shares is this one's. `search` is at its beginning.
template <int kOfBlock, class Keys>
__device__ void find_first_digit(const Bucket& bucket, const Keys& keys, int32_t share, Search<kOfBlock>& search) {
  const int32_t i = find_row_together(bucket.parts, &Part::first_share, share);
  const Part part = bucket.parts.rows[i];
  const Hint hint = hint_of(bucket, i);
  Progress& progress = bucket.progress[i];
  const uint32_t found = progress.found;  // all of that is loaded together
  const Source source = first_source(bucket, part, hint, found);
  const Worker worker(bucket, i, part, source, share);
  if (part.count == 0 || worker.me >= worker.workers) return;
  const FirstBins bins{source.slots ? floor_of(bucket, part, hint) : kAboveZero};
  const Reading<Keys, kOfBlock> reading(bucket, worker, keys);
  // By a thread of a warp that has fewer keys than others, while all wait for these.
  if (threadIdx.x == kOfBlock - 1) search.aim = aim_after(part, hint, found, !source.slots);
  reading.wait();
  __syncthreads();
  if (!find_first_bin(bucket, worker, reading, bins, search, progress)) return;
  if (source.is_small()) {
    const Worker alone(i, part, source);
    if (worker.workers == 1u) {
      find_rest(bucket, alone, reading, search);
    } else {
      const Reading<Keys, kOfBlock> all(bucket, alone, keys);
      all.wait();
      __syncthreads();
      find_rest(bucket, alone, all, search);
    }
  }
  conclude(search, progress, source.is_small() ? kDigits : 1u,
           [&] { progress.hint = next_hint(search, bins, part.count); });
}

// Finds the next digit, after so many, of those that are not known yet. A range is so narrow that two are enough.
template <int kOfBlock, class Keys>
__device__ void find_next_digit(const Bucket& bucket, const Keys& keys, int32_t share, Search<kOfBlock>& search,
                                uint32_t digits) {
  const int32_t i = find_row_together(bucket.parts, &Part::first_share, share);
  const Part part = bucket.parts.rows[i];
  Progress& progress = bucket.progress[i];
  const Source first = first_source(bucket, part, hint_of(bucket, i), progress.found);
  const Worker worker(bucket, i, part, next_source(bucket, part, progress, first), share);
  if (part.count == 0 || first.is_small() || worker.me >= worker.workers) return;
  if (threadIdx.x == 0) {
    search.digits = wait_for_digits(progress, digits);
    search.range = {read_now(progress.threshold), read_now(progress.bits)};
    search.rank = read_now(progress.rank);
  }
  search.clear();
  const Reading<Keys, kOfBlock> reading(bucket, worker, keys);
  reading.wait();
  __syncthreads();
  if (search.digits >= kDigits) return;
  if (find_next_bin(bucket, worker, reading, search)) conclude(search, progress, digits + 1u, [] {});
}

}  // namespace ringprune::cuda
