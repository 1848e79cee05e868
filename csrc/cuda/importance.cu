// importance on CUDA: one score per entry of the residual, from the entry, its weight and its tensor's parameter. One
// launch.

#include "kernels.h"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {
namespace {

template <class Score>
__global__ void __launch_bounds__(kThreads) score_tiles(Parts parts, const float* residual, float* scores) {
  wait_for_previous();
  const int64_t tile = grid_warp();
  if (tile >= parts.tiles) return;
  const Turns turns = turns_of(parts, tile);
  const Part& part = turns.part;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = turns.entry(turn), valid = turns.valid(turn);
    const Packed weights = load_packed(part.weight, part.weight_type, i, valid);
    const Quad<float> values = load4(residual + part.start + i, valid);
    store4(scores + part.start + i, valid, ScoredKeys<Score>::score(part, values, weights));
  }
}

}  // namespace

template <class Score>
void launch_importance(cudaStream_t stream, const Parts& parts, const float* residual, float* scores) {
  launch(stream, ceil_div(parts.tiles, kWarps), score_tiles<Score>, parts, residual, scores);
}

template void launch_importance<Ratio>(cudaStream_t, const Parts&, const float*, float*);
template void launch_importance<Magnitude>(cudaStream_t, const Parts&, const float*, float*);
template void launch_importance<Sum>(cudaStream_t, const Parts&, const float*, float*);
template void launch_importance<Product>(cudaStream_t, const Parts&, const float*, float*);

}  // namespace ringprune::cuda
