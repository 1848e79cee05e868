// A bucket as the kernels see it: a table with one row per tensor, and how their entries are shared out.
//
// A tile is what one warp reads at once, a strip what one block looks after; neither ever crosses a tensor. Small
// tensors so take a warp each, and any number of them share one launch.

#pragma once

#include <cstdint>

#include "../arithmetic.h"

namespace ringprune::cuda {

enum class Type : uint8_t { kFloat, kHalf, kBFloat16, kDouble };

constexpr int kTile = 512;       // entries: four turns of 32 lanes with four each
constexpr int kStripTiles = 32;  // as many as lanes
constexpr int kStrip = kStripTiles * kTile;

// One tensor of a bucket. An op fills in what it needs; pointers are null where it needs none.
struct alignas(16) Part {
  const void* grad;
  const void* weight;
  int64_t start;  // its first entry among those of all tensors
  int64_t entries;
  int64_t first_slot;  // where its candidates go
  int32_t room;        // for how many candidates there is room
  int32_t first_tile;
  int32_t first_strip;
  int32_t first_share;
  int32_t histogram;       // which one is its own; a tensor of one share needs none
  int32_t count;           // how many entries to select
  int32_t first_position;  // where the positions of these go
  float factor;
  float momentum;
  float parameter;
  bool nesterov;
  Type grad_type;
  Type weight_type;
};

// One tensor that is written by `put`.
struct alignas(16) Output {
  void* memory;
  int64_t start;
  int64_t entries;
  int32_t first_tile;
  Type type;
};

// One tensor whose momentum is shared; squares are null for SGD.
struct alignas(16) Sharing {
  const float* average;
  float* elapsed;
  void* momentum;
  const float* weight;
  const float* own;
  const void* square;
  int64_t start;
  int64_t entries;
  Pace pace;
  int32_t first_tile;
  Type momentum_type;
  Type square_type;
};

// A table on the device, and how many blocks or warps its rows need.
template <class Row>
struct Table {
  const Row* rows;
  const int32_t* first_tiles;  // of the rows once more, close together: every warp looks its tile up there
  int32_t count;
  int32_t tiles;
  int32_t strips;
  int32_t shares;
  int32_t share;  // entries that one block looks through for digits of the keys
};
using Parts = Table<Part>;

}  // namespace ringprune::cuda
