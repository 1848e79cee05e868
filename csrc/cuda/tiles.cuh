// Who works on what: from the number of a warp or block to its tensor, and to its entries there.

#pragma once

#include "launch.h"
#include "parts.h"
#include "warp.cuh"

namespace ringprune::cuda {

__device__ inline int32_t tiles_of(const Part& part) {
  return static_cast<int32_t>(ceil_div<int64_t>(part.entries, kTile));
}
__device__ inline int32_t strips_of(const Part& part) {
  return static_cast<int32_t>(ceil_div<int64_t>(part.entries, kStrip));
}
__device__ inline int32_t shares_of(const Part& part, int32_t share) {
  return static_cast<int32_t>(ceil_div<int64_t>(part.entries, share));
}

// The number of the last row with first(row) <= value, the rows being in that order, which all lanes of a warp look for
// together, at kLanes rows at a time. Empty tensors are never found, for the next begins where they do.
template <class First>
__device__ int32_t find_together(int32_t rows, int64_t value, const First& first) {
  int32_t low = 0, size = rows;  // low fits, low + size does not
  while (size > 1) {
    const int32_t each = ceil_div(size, kLanes), mine = lane() * each;
    const bool fits = mine < size && first(low + mine) <= value;
    const int32_t last = (__popc(__ballot_sync(kAllLanes, fits)) - 1) * each;
    low += last;
    size = min(each, size - last);
  }
  return low;
}

template <class Row, class First>
__device__ int32_t find_row_together(const Table<Row>& table, First Row::* first, int64_t value) {
  return find_together(table.count, value, [&](int32_t i) { return table.rows[i].*first; });
}

// Which row a tile belongs to.
template <class Row>
__device__ int32_t find_row_of_tile(const Table<Row>& table, int64_t tile) {
  return find_together(table.count, tile, [&](int32_t i) { return table.first_tiles[i]; });
}

constexpr int kTurn = 4 * kLanes;  // entries: four neighbours for each lane
constexpr int kTurns = kTile / kTurn;

// A tile in the hands of a warp: in every turn each lane has four neighbouring entries, of which some, or all, may lie
// behind the tensor's end (`valid` below 4, or below 1).
struct Turns {
  int32_t number;   // of the tensor
  const Part part;  // a copy: for all the compiler knows, stores through other pointers change the table
  int64_t begin;    // the tile's first entry in its tensor

  __device__ Turns(const Part& part, int32_t number, int64_t tile)
      : number(number), part(part), begin((tile - part.first_tile) * kTile) {}
  __device__ int64_t entry(int turn) const { return begin + turn * kTurn + 4 * lane(); }
  __device__ int64_t valid(int turn) const { return part.entries - entry(turn); }
};

__device__ inline Turns turns_of(const Parts& parts, int64_t tile) {
  const int32_t number = find_row_of_tile(parts, tile);
  return Turns(parts.rows[number], number, tile);
}

}  // namespace ringprune::cuda
