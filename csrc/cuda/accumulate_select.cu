// accumulate_select on CUDA: one pass over memory accumulates, scores and collects candidates; the exact selection is
// then among these. Seven launches, two for a small bucket.

#include "accumulate.cuh"
#include "kernels.h"
#include "selection.cuh"

namespace ringprune::cuda {
namespace {

// A warp a tile.
template <class Score>
__global__ void __launch_bounds__(kThreads) accumulate_collect(Bucket bucket, State state, int64_t* nonfinite) {
  wait_for_previous();
  __shared__ Gathered gathered[kWarps];
  __shared__ Gone gone[kWarps];
  const int64_t tile = grid_warp();
  if (tile >= bucket.parts.tiles) return;
  const Turns turns = turns_of(bucket.parts, tile);
  const Part& part = turns.part;
  Collector collector(gathered[warp()], floor_of(bucket, part, hint_of(bucket, turns.number)));
  gone[warp()].find(state.leaving, turns);
  int found = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t i = turns.entry(turn), valid = turns.valid(turn);
    const Packed weights = load_packed(part.weight, part.weight_type, i, valid);
    Four four(state, part, i, valid);
    gone[warp()].leave(state.leaving, four, turn);
    const Quad<float> residual = accumulate4(state, part, four, i, valid, found);
    using Keys = ScoredKeys<Score>;
    collector.add(Keys::keys(Keys::score(part, residual, weights), valid), turn);
  }
  collector.finish(bucket, part, tile, &bucket.progress[turns.number].found);
  add_all_lanes(nonfinite + turns.number, found);
}

}  // namespace

template <class Score>
void launch_accumulate_select(cudaStream_t stream, const Bucket& bucket, const State& state, int64_t* nonfinite) {
  launch(stream, ceil_div(bucket.parts.tiles, kWarps), accumulate_collect<Score>, bucket, state, nonfinite);
  select_collected(stream, bucket, ScoredKeys<Score>{state.residual_out});
}

template void launch_accumulate_select<Ratio>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Magnitude>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Sum>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Product>(cudaStream_t, const Bucket&, const State&, int64_t*);

}  // namespace ringprune::cuda
