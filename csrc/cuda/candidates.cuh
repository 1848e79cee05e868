// Collecting candidates: the entries of a tile whose key is not below a floor, in order, into slots of its tensor.

#pragma once

#include "hints.cuh"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {

// Where a warp gathers what it has found, before it asks for that many slots.
struct Gathered {
  uint32_t keys[kTile];
  uint16_t entries[kTile];
};

class Collector {
 public:
  __device__ Collector(Gathered& gathered, uint32_t floor) : gathered_(gathered), floor_(floor) {}

  // Takes up this turn's keys; all lanes together.
  __device__ void add(const Quad<uint32_t>& keys, int turn) {
    int slot = size_, found = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t lanes = __ballot_sync(kAllLanes, keys.v[e] >= floor_);
      slot += __popc(lanes & lanes_before());
      found += __popc(lanes);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (keys.v[e] < floor_) continue;
      gathered_.keys[slot] = keys.v[e];
      gathered_.entries[slot] = static_cast<uint16_t>(turn * kTurn + 4 * lane() + e);
      ++slot;
    }
    size_ += found;
  }

  // Moves everything into slots of the tensor, where there is room; `taken` counts them. The slots of a tile lie
  // wherever the order of the warps puts them, so nothing may depend on it: only `runs` says what comes first.
  __device__ void finish(const Bucket& bucket, const Part& part, int64_t tile, uint32_t* taken) const {
    __syncwarp();
    const auto size = static_cast<uint32_t>(size_);
    uint32_t first = 0;
    if (lane() == 0 && size > 0) first = atomicAdd(taken, size);
    first = __shfl_sync(kAllLanes, first, 0);
    if (lane() == 0) bucket.runs[tile] = {first, size};
    if (first + size > static_cast<uint32_t>(part.room)) return;
    for (uint32_t i = lane(); i < size; i += kLanes) {
      bucket.keys[part.first_slot + first + i] = gathered_.keys[i];
      bucket.entries[part.first_slot + first + i] = gathered_.entries[i];
    }
  }

 private:
  Gathered& gathered_;
  uint32_t floor_;
  int size_ = 0;
};

// Collects again, from the first digit of the threshold on, where the first candidates do not serve. A block a strip.
template <class Keys>
__global__ void __launch_bounds__(kThreads) recollect(Bucket bucket, Keys keys) {
  wait_for_previous();
  __shared__ Gathered gathered[kWarps];
  const int32_t i = find_row_together(bucket.parts, &Part::first_strip, blockIdx.x);
  const Part part = bucket.parts.rows[i];
  Progress& progress = bucket.progress[i];
  if (!progress.recollect) return;
  const int32_t tiles = part.first_tile + tiles_of(part);
  const int32_t first = part.first_tile + (static_cast<int32_t>(blockIdx.x) - part.first_strip) * kStripTiles;
  for (int32_t tile = first + warp(); tile < min(first + kStripTiles, tiles); tile += kWarps) {
    const Turns turns(part, i, tile);
    Collector collector(gathered[warp()], max(progress.threshold, kAboveZero));
    for (int turn = 0; turn < kTurns; ++turn) {
      collector.add(keys.load(part, turns.entry(turn), turns.valid(turn)), turn);
    }
    collector.finish(bucket, part, tile, &progress.collected);
    __syncwarp();  // the next tile is gathered in the same place
  }
}

}  // namespace ringprune::cuda
