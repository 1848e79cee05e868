// count_nonfinite on CUDA: how many entries of each tensor are NaN or infinite. One launch, a warp a tile.

#include "entries.cuh"
#include "kernels.h"
#include "tiles.cuh"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) count_nonfinite_tiles(Parts parts, int64_t* counts) {
  wait_for_previous();
  const int64_t tile = grid_warp();
  if (tile >= parts.tiles) return;
  const Turns turns = turns_of(parts, tile);
  const Part& part = turns.part;
  int found = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = turns.entry(turn), valid = turns.valid(turn);
    if (part.grad_type == Type::kDouble) {
      const Quad<double> quad = load4(static_cast<const double*>(part.grad) + i, valid);
      for (int e = 0; e < 4; ++e) found += !is_finite(quad.v[e]);
    } else {
      const Quad<float> quad = widen(load_packed(part.grad, part.grad_type, i, valid), part.grad_type);
      for (int e = 0; e < 4; ++e) found += !is_finite(quad.v[e]);
    }
  }
  add_all_lanes(counts + turns.number, found);
}

}  // namespace

void launch_count_nonfinite(cudaStream_t stream, const Parts& parts, int64_t* counts) {
  launch(stream, ceil_div(parts.tiles, kWarps), count_nonfinite_tiles, parts, counts);
}

}  // namespace ringprune::cuda
