// accumulate on CUDA: residual and velocity take up the gradients of many tensors. One launch.

#include "accumulate.cuh"
#include "kernels.h"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) accumulate_tiles(Parts parts, State state, int64_t* nonfinite) {
  wait_for_previous();
  __shared__ Gone gone[kWarps];
  const int64_t tile = grid_warp();
  if (tile >= parts.tiles) return;
  const Turns turns = turns_of(parts, tile);
  gone[warp()].find(state.leaving, turns);
  int found = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = turns.entry(turn), valid = turns.valid(turn);
    Four four(state, turns.part, i, valid);
    gone[warp()].leave(state.leaving, four, turn);
    accumulate4(state, turns.part, four, i, valid, found);
  }
  add_all_lanes(nonfinite + turns.number, found);
}

}  // namespace

void launch_accumulate(cudaStream_t stream, const Parts& parts, const State& state, int64_t* nonfinite) {
  launch(stream, ceil_div(parts.tiles, kWarps), accumulate_tiles, parts, state, nonfinite);
}

}  // namespace ringprune::cuda
