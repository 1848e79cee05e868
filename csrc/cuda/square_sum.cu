// square_sum on CUDA: sums of squares in double, added in the one tree of csrc/cpu/square_sum.cpp. Two launches.
//
// Neighbours are added in pairs, then their sums, and so on. An entry without neighbour is added to zero, which changes
// no bit of a square; two lanes that add each other's sums get the same one.

#include "entries.cuh"
#include "kernels.h"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

constexpr int kSumTurns = kSumTile / kTurn;  // at most as many as lanes

// Squares of four neighbours of a tensor.
struct Squares {
  const void* base;
  Type type;

  __device__ Quad<double> load(int64_t i, int64_t valid) const {
    Quad<double> quad;
    if (type == Type::kDouble) {
      quad = load4(static_cast<const double*>(base) + i, valid);
    } else {
      const Quad<float> narrow = widen(load_packed(base, type, i, valid), type);
      for (int e = 0; e < 4; ++e) quad.v[e] = static_cast<double>(narrow.v[e]);
    }
    for (int e = 0; e < 4; ++e) quad.v[e] *= quad.v[e];
    return quad;
  }
};

// Sums that have been taken already.
struct Sums {
  const double* sums;

  __device__ Quad<double> load(int64_t i, int64_t valid) const { return load4(sums + i, valid); }
};

// The subtree over the sum of all lanes; the same in every lane.
__device__ double add_lanes(double sum) {
  for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// The subtree over one tile of `count` numbers, by a warp.
template <class Numbers>
__device__ double add_tile(const Numbers& numbers, int64_t tile, int64_t count) {
  double sum = 0.0;
#pragma unroll 4
  for (int turn = 0; turn < kSumTurns; ++turn) {
    const int64_t i = tile * kSumTile + turn * kTurn + 4 * lane();
    const Quad<double> quad = numbers.load(i, count - i);
    const double of_turn = add_lanes((quad.v[0] + quad.v[1]) + (quad.v[2] + quad.v[3]));
    if (lane() == turn) sum = of_turn;  // the turns' sums lie side by side in the lanes, as the turns do
  }
  return add_lanes(sum);
}

// A warp a tile.
__global__ void __launch_bounds__(kThreads) add_tiles(Parts parts, double* sums_of_tiles) {
  wait_for_previous();
  const int64_t tile = grid_warp();
  if (tile >= parts.tiles) return;
  const Part& part = parts.rows[find_row_of_tile(parts, tile)];
  const double sum = add_tile(Squares{part.grad, part.grad_type}, tile - part.first_tile, part.entries);
  if (lane() == 0) sums_of_tiles[tile] = sum;
}

// A block a tensor: at each turn there are kSumTile times fewer numbers.
__global__ void __launch_bounds__(kThreads) add_sums(Parts parts, double* sums_of_tiles, double* sums) {
  wait_for_previous();
  const Part& part = parts.rows[blockIdx.x];
  const double* from = sums_of_tiles + part.first_tile;
  double* to = sums_of_tiles + part.first_slot;
  int64_t count = ceil_div<int64_t>(part.entries, kSumTile);
  while (count > 1) {
    const int64_t tiles = ceil_div<int64_t>(count, kSumTile);
    for (int64_t tile = warp(); tile < tiles; tile += kWarps) {
      const double sum = add_tile(Sums{from}, tile, count);
      if (lane() == 0) to[tile] = sum;
    }
    __syncthreads();
    from = to;
    to += tiles;
    count = tiles;
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = count > 0 ? from[0] : 0.0;
}

}  // namespace

void launch_square_sum(cudaStream_t stream, const Parts& parts, double* sums_of_tiles, double* sums) {
  launch(stream, ceil_div(parts.tiles, kWarps), add_tiles, parts, sums_of_tiles);
  launch(stream, parts.count, add_sums, parts, sums_of_tiles, sums);
}

}  // namespace ringprune::cuda
