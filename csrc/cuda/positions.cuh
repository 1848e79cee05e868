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
  const Part& part;
  int32_t me;          // which of the tensor's strips
  int32_t first_tile;  // of all tiles
  int32_t tiles;

  __device__ explicit Strip(const Parts& parts)
      : i(find_row(parts, &Part::first_strip, blockIdx.x)),
        part(parts.rows[i]),
        me(static_cast<int32_t>(blockIdx.x) - part.first_strip),
        first_tile(part.first_tile + me * kStripTiles),
        tiles(min(kStripTiles, tiles_of(part) - me * kStripTiles)) {}
};

// What may be selected of one tile, in order: its candidates, or all of its entries.
template <class Keys>
struct Items {
  const Bucket& bucket;
  const Part& part;
  const Keys& keys;
  bool slots;
  int64_t first;  // slot of the bucket, or entry of the tensor
  int64_t begin;  // the tile's first entry in the tensor
  uint32_t size;

  __device__ Items(const Bucket& bucket, const Part& part, const Keys& keys, bool slots, int32_t tile)
      : bucket(bucket), part(part), keys(keys), slots(slots), begin(int64_t{tile - part.first_tile} * kTile) {
    const Run run =
        slots ? bucket.runs[tile] : Run{0, static_cast<uint32_t>(min(part.entries - begin, int64_t{kTile}))};
    first = slots ? part.first_slot + run.first : begin;
    size = run.size;
  }
  __device__ uint32_t key(uint32_t j) const {
    return slots ? bucket.keys[first + j] : keys.load(part, first + j, 1).v[0];
  }
  __device__ int64_t entry(uint32_t j) const { return slots ? begin + bucket.entries[first + j] : first + j; }
};

// Calls body(j, counts of the items before j, whether j is above, whether equal) for every item of the warp's tile;
// returns the counts of all.
template <class Keys, class Body>
__device__ Counts for_each_item(const Items<Keys>& items, uint32_t threshold, const Body& body) {
  Counts counts = 0;
  for (uint32_t turn = 0; turn < items.size; turn += kLanes) {
    const uint32_t j = turn + lane();
    const uint32_t key = j < items.size ? items.key(j) : 0u;
    const bool is_above = key > threshold, is_equal = key == threshold && key != 0u;
    const uint32_t above = __ballot_sync(kAllLanes, is_above), equal = __ballot_sync(kAllLanes, is_equal);
    body(j, counts + __popc(above & lanes_before()) * kOneAbove + __popc(equal & lanes_before()) * kOneEqual, is_above,
         is_equal);
    counts += __popc(above) * kOneAbove + __popc(equal) * kOneEqual;
  }
  return counts;
}

// Turns the counts of a tensor's strips into those of the strips before, by its last block. Each thread adds up
// neighbours, so that the threads' sums have to be scanned only once.
__device__ inline void scan_strips(Counts* counts, int32_t strips) {
  const int32_t each = ceil_div(strips, kThreads);
  const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * each, strips), end = min(begin + each, strips);
  Counts own = 0, total = 0;
  for (int32_t j = begin; j < end; ++j) own += __ldcg(&counts[j]);
  Counts before = block_scan(own, total);
  for (int32_t j = begin; j < end; ++j) {
    const Counts here = __ldcg(&counts[j]);
    counts[j] = before;
    before += here;
  }
}

// A block a strip, a warp a tile.
template <class Keys>
__global__ void __launch_bounds__(kThreads) count_tiles(Bucket bucket, Keys keys) {
  __shared__ Counts counts[kStripTiles];
  const Strip strip(bucket.parts);
  if (strip.part.count == 0) return;
  Progress& progress = bucket.progress[strip.i];
  const bool slots = source_of(strip.part, progress).slots;
  const uint32_t threshold = progress.all ? 0u : progress.threshold;
  for (int t = warp(); t < kStripTiles; t += kWarps) {
    Counts found = 0;
    if (t < strip.tiles) {
      const Items<Keys> items(bucket, strip.part, keys, slots, strip.first_tile + t);
      found = for_each_item(items, threshold, [](auto...) {});
    }
    if (lane() == 0) counts[t] = found;
  }
  __syncthreads();
  if (warp() == 0) {
    const Counts own = counts[lane()], up_to = warp_scan(own);
    if (lane() < strip.tiles) bucket.tile_counts[strip.first_tile + lane()] = up_to - own;
    if (lane() == kLanes - 1) bucket.strip_counts[blockIdx.x] = up_to;
  }
  const int32_t strips = strips_of(strip.part);
  if (!arrives_last(&progress.arrived, strips)) return;
  scan_strips(bucket.strip_counts + strip.part.first_strip, strips);
  if (threadIdx.x == 0) remember(bucket, strip.i);
}

template <class Keys>
__global__ void __launch_bounds__(kThreads) write_positions(Bucket bucket, Keys keys) {
  const Strip strip(bucket.parts);
  const Part& part = strip.part;
  if (part.count == 0) return;
  const Progress& progress = bucket.progress[strip.i];
  const bool slots = source_of(part, progress).slots;
  const uint32_t threshold = progress.all ? 0u : progress.threshold;
  const uint32_t ties = progress.all ? 0u : progress.rank;
  int32_t* positions = bucket.positions + part.first_position;
  for (int t = warp(); t < strip.tiles; t += kWarps) {
    const Items<Keys> items(bucket, part, keys, slots, strip.first_tile + t);
    const Counts before = bucket.strip_counts[blockIdx.x] + bucket.tile_counts[strip.first_tile + t];
    for_each_item(items, threshold, [&](uint32_t j, Counts in_tile, bool is_above, bool is_equal) {
      const Counts all = before + in_tile;
      if (!is_above && !(is_equal && equal_of(all) < ties)) return;
      positions[above_of(all) + min(equal_of(all), ties)] = static_cast<int32_t>(part.start + items.entry(j));
    });
  }
  const int64_t step = int64_t{strips_of(part)} * kThreads;
  for (int64_t i = progress.selected + int64_t{strip.me} * kThreads + threadIdx.x; i < part.count; i += step) {
    positions[i] = kPad;
  }
}

}  // namespace ringprune::cuda
