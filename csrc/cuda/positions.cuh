// From the threshold to the positions: counted per tile, added up in order, written where they belong, in one kernel.

#pragma once

#include "digits.cuh"
#include "hints.cuh"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {

constexpr Counts kOneAbove = Counts{1} << 32;
constexpr Counts kOneEqual = 1;
__device__ inline uint32_t above_of(Counts counts) { return static_cast<uint32_t>(counts >> 32); }
__device__ inline uint32_t equal_of(Counts counts) { return static_cast<uint32_t>(counts); }

// The strip of this block.
struct Strip {
  int32_t i;  // of the tensor
  Part part;
  int32_t me;          // which of the tensor's strips
  int32_t first_tile;  // of all tiles
  int32_t tiles;

  __device__ Strip(const Parts& parts, int32_t number)
      : i(find_row_together(parts, &Part::first_strip, number)),
        part(parts.rows[i]),
        me(number - part.first_strip),
        first_tile(part.first_tile + me * kStripTiles),
        tiles(min(kStripTiles, tiles_of(part) - me * kStripTiles)) {}
};

// What may be selected of one tile, in order: its candidates, or all of its entries.
struct Items {
  int32_t first;  // slot of the bucket, or entry of the tensor
  uint32_t size;
  uint32_t key;    // of the lane's first, where they are candidates
  uint32_t entry;  // of the tensor; the same one's
};

// The tiles of a strip that fall to this warp, one in as many as the block has warps. What was collected of all of them
// is loaded together, for waiting is what takes time here.
template <class Keys, int kOfBlock>
class WarpTiles {
 public:
  static constexpr int kEach = kStripTiles * kLanes / kOfBlock;

  __device__ WarpTiles(const Bucket& bucket, const Strip& strip, const Keys& keys)
      : bucket_(bucket), part_(strip.part), keys_(keys), first_entry_(strip.me * kStrip) {
    Run runs[kEach];  // loaded before it is known whether they serve
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      runs[k] = number(k) < strip.tiles ? bucket.runs[strip.first_tile + number(k)] : Run{0, 0};
    }
    const Progress& progress = bucket.progress[strip.i];
    const Source first = first_source(bucket, part_, hint_of(bucket, strip.i), progress.found);
    slots_ = next_source(bucket, part_, progress, first).slots;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t rest = part_.entries - begin(k);
      const auto all = static_cast<uint32_t>(max(min(rest, int64_t{kTile}), int64_t{0}));
      items_[k].first = slots_ ? static_cast<int32_t>(part_.first_slot + runs[k].first) : begin(k);
      items_[k].size = slots_ ? runs[k].size : all;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const bool has = slots_ && static_cast<uint32_t>(lane()) < items_[k].size;
      items_[k].key = has ? key(k, lane()) : 0u;
      items_[k].entry = has ? entry(k, lane()) : 0u;
    }
  }

  // Which tile of the strip the warp's k-th is.
  __device__ static int number(int k) { return warp() + k * (kOfBlock / kLanes); }

  // Calls body(entry of the tensor, counts of the items before, whether it is above, whether equal) for every item of
  // the k-th tile; returns the counts of all.
  template <class Body>
  __device__ Counts for_each_item(int k, uint32_t threshold, const Body& body) const {
    constexpr uint32_t kTurnsTogether = 4;
    const uint32_t size = items_[k].size;
    Counts counts = 0;
    for (uint32_t begin = 0; begin < size; begin += kTurnsTogether * kLanes) {
      uint32_t some[kTurnsTogether];
#pragma unroll
      for (uint32_t turn = 0; turn < kTurnsTogether; ++turn) {
        const uint32_t j = begin + turn * kLanes + lane();
        some[turn] = is_at_hand(j) ? items_[k].key : j < size ? key(k, j) : 0u;
      }
#pragma unroll
      for (uint32_t turn = 0; turn < kTurnsTogether; ++turn) {
        const uint32_t j = begin + turn * kLanes + lane();
        if (begin + turn * kLanes >= size) break;
        const bool is_above = some[turn] > threshold, is_equal = some[turn] == threshold && some[turn] != 0u;
        const uint32_t above = __ballot_sync(kAllLanes, is_above), equal = __ballot_sync(kAllLanes, is_equal);
        body([&] { return is_at_hand(j) ? items_[k].entry : entry(k, j); },
             counts + __popc(above & lanes_before()) * kOneAbove + __popc(equal & lanes_before()) * kOneEqual, is_above,
             is_equal);
        counts += __popc(above) * kOneAbove + __popc(equal) * kOneEqual;
      }
    }
    return counts;
  }

 private:
  __device__ bool is_at_hand(uint32_t j) const { return slots_ && j == static_cast<uint32_t>(lane()); }
  __device__ int32_t begin(int k) const { return first_entry_ + number(k) * kTile; }
  __device__ uint32_t key(int k, uint32_t j) const {
    return slots_ ? bucket_.keys[items_[k].first + j] : keys_.load(part_, items_[k].first + j, 1).v[0];
  }
  __device__ uint32_t entry(int k, uint32_t j) const {
    return slots_ ? begin(k) + bucket_.entries[items_[k].first + j] : items_[k].first + j;
  }

  const Bucket& bucket_;
  const Part& part_;
  const Keys& keys_;
  int32_t first_entry_;
  bool slots_;
  Items items_[kEach];
};

// Counts of strips as other blocks may read them, once they are there.
class Announced {
 public:
  __device__ explicit Announced(Counts* counts) : counts_(counts) {}

  // In one access, so that nobody sees a part of it.
  __device__ void announce(int32_t j, Counts counts) const { counts_[j] = counts | kThere; }

  // This thread's part of the sum over [begin, end); it waits for those that are not there yet.
  template <int kOfBlock>
  __device__ Counts some(int32_t begin, int32_t end) const {
    Counts sum = 0;
    for (int32_t first = begin + static_cast<int32_t>(threadIdx.x); first < end; first += kTogether * kOfBlock) {
      Counts found[kTogether], all;
      do {
        all = kThere;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const int32_t j = first + k * kOfBlock;
          found[k] = kThere;
          if (j < end) found[k] = counts_[j];
          all &= found[k];
        }
      } while (all == 0);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) sum += found[k] & ~kThere;
    }
    return sum;
  }

 private:
  static constexpr int kTogether = 4;
  static constexpr Counts kThere = Counts{1} << 63;
  volatile Counts* counts_;
};

// The counts of a tensor's strips before this one, which announces its own. All threads together. Where there are many
// strips, the first of each group announces the sum of all before it.
template <int kOfBlock>
__device__ Counts counts_before(const Bucket& bucket, const Strip& strip, Counts own) {
  const Announced strips(bucket.strip_counts + strip.part.first_strip);
  const Announced groups(bucket.group_counts + group_of(strip.i, strip.part.first_strip, 0));
  if (threadIdx.x == 0) strips.announce(strip.me, own);
  const int32_t group = strip.me / kGroup;
  const bool is_first = strip.me % kGroup == 0 && group > 0;
  const int32_t from = is_first ? group - 1 : group;
  Counts some = strips.some<kOfBlock>(from * kGroup, strip.me), before;
  if (from > 0 && threadIdx.x == 0) some += groups.some<kOfBlock>(from, from + 1);
  block_scan<kOfBlock>(some, before);
  if (is_first && threadIdx.x == 0) groups.announce(group, before);
  return before;
}

// Writes the positions of a strip, the `number`-th of all, as soon as its tensor's threshold is known.
template <int kOfBlock, class Keys>
__device__ void write_strip(const Bucket& bucket, const Keys& keys, int32_t number) {
  __shared__ Counts of_tiles[kStripTiles];
  const Strip strip(bucket.parts, number);
  const Part& part = strip.part;
  if (part.count == 0) return;
  using Tiles = WarpTiles<Keys, kOfBlock>;
  const Tiles tiles(bucket, strip, keys);
  const Progress& progress = bucket.progress[strip.i];
  uint64_t outcome = 0;
  while (lane() == 0 && outcome == 0) outcome = read_now(progress.outcome);
  outcome = __shfl_sync(kAllLanes, outcome, 0);
  const auto threshold = static_cast<uint32_t>(outcome >> 32) & 0x7fffffffu, ties = static_cast<uint32_t>(outcome);
#pragma unroll
  for (int k = 0; k < Tiles::kEach; ++k) {
    const Counts found = tiles.for_each_item(k, threshold, [](auto...) {});
    if (lane() == 0) of_tiles[tiles.number(k)] = found;
  }
  __syncthreads();
  const Counts own = of_tiles[lane()], up_to = warp_scan(own);
  const Counts of_strip = __shfl_sync(kAllLanes, up_to, kLanes - 1);
  const Counts before = counts_before<kOfBlock>(bucket, strip, of_strip) + up_to - own;
  int32_t* positions = bucket.positions + part.first_position;
#pragma unroll
  for (int k = 0; k < Tiles::kEach; ++k) {
    const Counts before_tile = __shfl_sync(kAllLanes, before, tiles.number(k));
    tiles.for_each_item(k, threshold, [&](auto entry, Counts in_tile, bool is_above, bool is_equal) {
      const Counts all = before_tile + in_tile;
      if (!is_above && !(is_equal && equal_of(all) < ties)) return;
      positions[above_of(all) + min(equal_of(all), ties)] = static_cast<int32_t>(part.start + entry());
    });
  }
  if (threshold > 0u) return;  // as many as were asked for
  __threadfence();
  const int64_t step = int64_t{strips_of(part)} * kOfBlock;
  for (int64_t i = read_now(progress.selected) + int64_t{strip.me} * kOfBlock + threadIdx.x; i < part.count;
       i += step) {
    positions[i] = kPad;
  }
}

// Keeps what is to be kept of a tensor when all blocks that write its positions have read the hint it had.
template <int kOfBlock>
__device__ void finish(const Bucket& bucket, int32_t i) {
  const Part part = bucket.parts.rows[i];
  if (part.count == 0) return;
  Announced(bucket.strip_counts + part.first_strip).some<kOfBlock>(0, strips_of(part));
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  const Progress& now = bucket.progress[i];
  Progress progress{};
  progress.found = read_now(now.found);
  progress.recollect = read_now(now.recollect);
  progress.all = read_now(now.all);
  progress.threshold = read_now(now.threshold);
  progress.hint = read_now(now.hint);
  remember(bucket, i, part, progress);
}

}  // namespace ringprune::cuda
