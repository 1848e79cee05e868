// From the threshold to the positions: counted per tile, added up in order, written where they belong.

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

  __device__ WarpTiles(const Bucket& bucket, const Strip& strip, const Keys& keys, bool slots)
      : bucket_(bucket), part_(strip.part), keys_(keys), first_entry_(strip.me * kStrip), slots_(slots) {
    Run runs[kEach];  // loaded before it is known whether they serve, which `slots` says
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      runs[k] = number(k) < strip.tiles ? bucket.runs[strip.first_tile + number(k)] : Run{0, 0};
    }
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

// What a strip has, tile by tile, and the tensor's threshold, for which this waits.
template <class Keys, int kOfBlock>
struct Selected {
  using Tiles = WarpTiles<Keys, kOfBlock>;
  const Bucket& bucket;
  const Strip& strip;
  const Progress& progress;
  Tiles tiles;
  uint32_t threshold;
  uint32_t ties;  // how many of those equal to it

  __device__ Selected(const Bucket& bucket, const Strip& strip, const Keys& keys, bool slots)
      : bucket(bucket), strip(strip), progress(bucket.progress[strip.i]), tiles(bucket, strip, keys, slots) {
    uint64_t outcome = 0;
    while (lane() == 0 && outcome == 0) outcome = read_now(progress.outcome);
    outcome = __shfl_sync(kAllLanes, outcome, 0);
    threshold = static_cast<uint32_t>(outcome >> 32) & 0x7fffffffu;
    ties = static_cast<uint32_t>(outcome);
  }

  // For each lane the counts of the tiles up to that one. All threads together.
  __device__ Counts count() const {
    __shared__ Counts of_tiles[kStripTiles];
#pragma unroll
    for (int k = 0; k < Tiles::kEach; ++k) {
      const Counts found = tiles.for_each_item(k, threshold, [](auto...) {});
      if (lane() == 0) of_tiles[tiles.number(k)] = found;
    }
    __syncthreads();
    return warp_scan(of_tiles[lane()]);
  }

  // Writes their positions; before(k) is how many come before the warp's k-th tile.
  template <class Before>
  __device__ void write(const Before& before) const {
    int32_t* positions = bucket.positions + strip.part.first_position;
#pragma unroll
    for (int k = 0; k < Tiles::kEach; ++k) {
      const Counts before_tile = before(k);
      tiles.for_each_item(k, threshold, [&](auto entry, Counts in_tile, bool is_above, bool is_equal) {
        const Counts all = before_tile + in_tile;
        if (!is_above && !(is_equal && equal_of(all) < ties)) return;
        positions[above_of(all) + min(equal_of(all), ties)] = static_cast<int32_t>(strip.part.start + entry());
      });
    }
    if (threshold > 0u) return;  // there are as many as were asked for
    wait_for_digits(progress, kDigits);
    const int64_t step = int64_t{strips_of(strip.part)} * kOfBlock, mine = int64_t{strip.me} * kOfBlock + threadIdx.x;
    for (int64_t i = read_now(progress.selected) + mine; i < strip.part.count; i += step) positions[i] = kPad;
  }
};

// Whether the slots serve, which was found before this kernel began.
__device__ inline bool in_slots(const Bucket& bucket, const Strip& strip) {
  const Progress& progress = bucket.progress[strip.i];
  return !progress.recollect || progress.collected <= static_cast<uint32_t>(strip.part.room);
}

// A block a strip.
template <class Keys>
__global__ void __launch_bounds__(kThreads) count_tiles(Bucket bucket, Keys keys) {
  wait_for_previous();
  const Strip strip(bucket.parts, static_cast<int32_t>(blockIdx.x));
  if (strip.part.count == 0) return;
  const Counts up_to = Selected<Keys, kThreads>(bucket, strip, keys, in_slots(bucket, strip)).count();
  const Counts before = __shfl_up_sync(kAllLanes, up_to, 1);
  if (warp() != 0) return;
  if (lane() < strip.tiles) bucket.tile_counts[strip.first_tile + lane()] = lane() == 0 ? 0 : before;
  if (lane() != kLanes - 1) return;
  bucket.strip_counts[blockIdx.x] = up_to;
  add_to(&bucket.group_counts[group_of(strip.i, strip.part.first_strip, strip.me)], up_to);
}

// This thread's part of the counts of a tensor's strips before this one: of whole groups, and of the rest.
__device__ inline Counts some_before(const Bucket& bucket, const Strip& strip) {
  const Counts* groups = bucket.group_counts + group_of(strip.i, strip.part.first_strip, 0);
  const Counts* strips = bucket.strip_counts + strip.part.first_strip;
  const int32_t whole = strip.me / kGroup, rest = whole * kGroup + static_cast<int32_t>(threadIdx.x);
  Counts some = rest < strip.me ? strips[rest] : 0;
  for (int32_t j = threadIdx.x; j < whole; j += kThreads) some += groups[j];
  return some;
}

// A block a strip, then a block a tensor for what is kept of it.
template <class Keys>
__global__ void __launch_bounds__(kThreads) write_positions(Bucket bucket, Keys keys) {
  wait_for_previous();
  const auto number = static_cast<int32_t>(blockIdx.x);
  if (number >= bucket.parts.strips) {
    if (threadIdx.x == 0) remember(bucket, number - bucket.parts.strips);
    return;
  }
  const Strip strip(bucket.parts, number);
  if (strip.part.count == 0) return;
  const Counts some = some_before(bucket, strip);
  using Tiles = WarpTiles<Keys, kThreads>;
  Counts before_tile[Tiles::kEach], before_strip;
#pragma unroll
  for (int k = 0; k < Tiles::kEach; ++k) {
    before_tile[k] = Tiles::number(k) < strip.tiles ? bucket.tile_counts[strip.first_tile + Tiles::number(k)] : 0;
  }
  const Selected<Keys, kThreads> selected(bucket, strip, keys, in_slots(bucket, strip));
  block_scan(some, before_strip);
  selected.write([&](int k) { return before_strip + before_tile[k]; });
}

}  // namespace ringprune::cuda
