// share_momentum on CUDA: an optimizer's momentum becomes the speed of all ranks. One launch, a warp a tile.

#include "entries.cuh"
#include "kernels.h"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

template <bool kAdam>
__global__ void __launch_bounds__(kThreads) share_momentum_tiles(Table<Sharing> tensors) {
  wait_for_previous();
  const int64_t tile = grid_warp();
  if (tile >= tensors.tiles) return;
  const Sharing of = tensors.rows[find_row_of_tile(tensors, tile)];
  const int64_t begin = (tile - of.first_tile) * kTile;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = begin + turn * kTurn + 4 * lane(), valid = of.entries - i;
    const Quad<float> average = load4(of.average + i, valid);
    const Quad<float> weight = load4(of.weight + i, valid), own = load4(of.own + i, valid);
    Quad<float> elapsed = load4(of.elapsed + i, valid), square{};
    const Packed packed = load_packed(of.momentum, of.momentum_type, i, valid);
    if constexpr (kAdam) square = widen(load_packed(of.square, of.square_type, i, valid), of.square_type);
    Quad<float> momentum = widen(packed, of.momentum_type);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      share<kAdam>(average.v[e], elapsed.v[e], momentum.v[e], weight.v[e], own.v[e], square.v[e], of.pace);
    }
    store4(of.elapsed + i, valid, elapsed);
    store_rounded(of.momentum, of.momentum_type, i, valid, momentum);
  }
}

}  // namespace

void launch_share_momentum(cudaStream_t stream, const Table<Sharing>& tensors, bool is_adam) {
  const auto kernel = is_adam ? share_momentum_tiles<true> : share_momentum_tiles<false>;
  launch(stream, ceil_div(tensors.tiles, kWarps), kernel, tensors);
}

}  // namespace ringprune::cuda
