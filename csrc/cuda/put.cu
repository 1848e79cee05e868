// put on CUDA: many tensors become zero but for the averaged values. Two launches: clear, then write.

#include "entries.cuh"
#include "kernels.h"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

// A warp a tile.
__global__ void __launch_bounds__(kThreads) clear_tiles(Table<Output> outputs) {
  wait_for_previous();
  const int64_t tile = grid_warp();
  if (tile >= outputs.tiles) return;
  const Output& output = outputs.rows[find_row_together(outputs, &Output::first_tile, tile)];
  const int64_t begin = (tile - output.first_tile) * kTile;
  for (int64_t i = begin + 4 * lane(); i < begin + kTile; i += kTurn) {
    if (output.type == Type::kFloat) {
      store4(static_cast<uint32_t*>(output.memory) + i, output.entries - i, Quad<uint32_t>{});
    } else {
      store4(static_cast<uint16_t*>(output.memory) + i, output.entries - i, Quad<uint16_t>{});
    }
  }
}

// A thread an index, from the last on: what has been cleared last is still in the cache.
__global__ void __launch_bounds__(kThreads) write_values(Table<Output> outputs, Indices indices, const float* values) {
  wait_for_previous();
  const int64_t j = indices.count - 1 - (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (j < 0) return;
  const int64_t index = indices.memory[j];
  if (index < 0 || index >= indices.numel) return;
  const Output& output = outputs.rows[find_row(outputs, &Output::start, index)];
  const int64_t i = index - output.start;
  if (output.type == Type::kFloat) static_cast<float*>(output.memory)[i] = values[j];
  if (output.type == Type::kHalf) static_cast<c10::Half*>(output.memory)[i] = values[j];
  if (output.type == Type::kBFloat16) static_cast<c10::BFloat16*>(output.memory)[i] = values[j];
}

}  // namespace

void launch_put(cudaStream_t stream, const Table<Output>& outputs, const Indices& indices, const float* values) {
  launch(stream, ceil_div(outputs.tiles, kWarps), clear_tiles, outputs);
  launch(stream, ceil_div<int64_t>(indices.count, kThreads), write_values, outputs, indices, values);
}

}  // namespace ringprune::cuda
