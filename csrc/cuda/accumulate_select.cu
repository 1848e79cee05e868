// accumulate_select on CUDA: one pass over memory accumulates, scores and collects candidates; the exact selection is
// then among these. Six launches, two for a small bucket.

#include "accumulate.cuh"
#include "kernels.h"
#include "selection.cuh"

namespace ringprune::cuda {
namespace {

// A warp a tile. Turns are loaded `kAhead` at a time.
template <class Score, int kAhead>
__global__ void __launch_bounds__(kThreads) accumulate_collect(Bucket bucket, State state, int64_t* nonfinite) {
  wait_for_previous();
  __shared__ Gathered gathered[kWarps];
  __shared__ Gone gone[kWarps];
  const int64_t tile = grid_warp();
  if (tile >= bucket.parts.tiles) return;
  const Turns turns = turns_of(bucket.parts, tile);
  const Part& part = turns.part;
  Collector collector(gathered[warp()], floor_of(bucket, part, hint_of(bucket, turns.number)));
  if (kAhead == 1) gone[warp()].find(state.leaving, turns);
  int found = 0;
  for (int first = 0; first < kTurns; first += kAhead) {
    Packed weights[kAhead];
    Four fours[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = turns.entry(first + k), valid = turns.valid(first + k);
      weights[k] = load_packed(part.weight, part.weight_type, i, valid);
      fours[k] = Four(state, part, i, valid);
    }
    if (kAhead > 1 && first == 0) gone[warp()].find(state.leaving, turns);  // while these are on their way
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int turn = first + k;
      const int64_t i = turns.entry(turn), valid = turns.valid(turn);
      gone[warp()].leave(state.leaving, fours[k], turn);
      const Quad<float> residual = accumulate4(state, part, fours[k], i, valid, found);
      using Keys = ScoredKeys<Score>;
      collector.add(Keys::keys(Keys::score(part, residual, weights[k]), valid), turn);
    }
  }
  collector.finish(bucket, part, tile, &bucket.progress[turns.number].found);
  add_all_lanes(nonfinite + turns.number, found);
}

}  // namespace

template <class Score>
void launch_accumulate_select(cudaStream_t stream, const Bucket& bucket, const State& state, int64_t* nonfinite) {
  // Of a small bucket few warps run, and each has to have more under way.
  const auto collect = bucket.at_once ? accumulate_collect<Score, 2> : accumulate_collect<Score, 1>;
  launch(stream, ceil_div(bucket.parts.tiles, kWarps), collect, bucket, state, nonfinite);
  select_collected(stream, bucket, ScoredKeys<Score>{state.residual_out});
}

template void launch_accumulate_select<Ratio>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Magnitude>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Sum>(cudaStream_t, const Bucket&, const State&, int64_t*);
template void launch_accumulate_select<Product>(cudaStream_t, const Bucket&, const State&, int64_t*);

}  // namespace ringprune::cuda
