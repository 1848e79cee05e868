// put on CUDA: many tensors become zero but for the averaged values. One launch.

#include "entries.cuh"
#include "kernels.h"
#include "marks.cuh"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

constexpr int kTogether = 4;  // of a dense set each tile has many indices

// A tile in shared memory, as it is to be.
struct Whole {
  Quad<float> quads[kTile / 4];

  __device__ float& entry(uint32_t i) { return quads[i / 4].v[i % 4]; }
};

// A warp a tile.
__global__ void __launch_bounds__(kThreads) put_tiles(Table<Output> outputs, Indices indices, const float* values) {
  wait_for_previous();
  __shared__ Whole wholes[kWarps];
  const int64_t tile = grid_warp();
  if (tile >= outputs.tiles) return;
  const Output output = outputs.rows[find_row_of_tile(outputs, tile)];
  const int64_t begin = (tile - output.first_tile) * kTile;
  Whole& whole = wholes[warp()];
  for (int turn = 0; turn < kTurns; ++turn) whole.quads[turn * kLanes + lane()] = Quad<float>{};
  __syncwarp();
  const Span span(indices, output.start, output.entries, begin);
  for_each_index<kTogether>(
      indices, span, [&](int32_t j) { return values[j]; },
      [&](uint32_t entry, float value) { whole.entry(entry) = value; });
  __syncwarp();
  const int64_t left = output.entries - begin;
  for (int i = 4 * lane(); i < kTile; i += kTurn) {
    store_rounded(output.memory, output.type, begin + i, left - i, whole.quads[i / 4]);
  }
}

}  // namespace

void launch_put(cudaStream_t stream, const Table<Output>& outputs, const Indices& indices, const float* values) {
  launch(stream, ceil_div(outputs.tiles, kWarps), put_tiles, outputs, indices, values);
}

}  // namespace ringprune::cuda
