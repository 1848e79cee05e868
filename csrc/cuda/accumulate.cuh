// The work of accumulate on four neighbouring entries.

#pragma once

#include "../arithmetic.h"
#include "entries.cuh"
#include "kernels.h"
#include "marks.cuh"

namespace ringprune::cuda {

// What is read of four neighbouring entries of one tensor.
struct Four {
  Packed grad;
  Quad<float> residual;
  Quad<float> velocity;

  Four() = default;
  __device__ Four(const State& state, const Part& part, int64_t i, int64_t valid)
      : grad(load_packed(part.grad, part.grad_type, i, valid)),
        residual(load4(state.residual + part.start + i, valid)),
        velocity{} {
    if (state.velocity) velocity = load4(state.velocity + part.start + i, valid);
  }
};

// What was sent of a tile. In shared memory, where it takes no registers from the loop over the turns.
struct Gone {
  Marks marks;
  bool masks;

  // All lanes together, before the first turn.
  __device__ void find(const Leaving& leaving, const Turns& turns) {
    if (!leaving.indices.memory) return;
    const Part& part = turns.part;
    const Span span(leaving.indices, part.start, part.entries, turns.begin);
    const bool any = marks.set(leaving.indices, span);
    if (lane() == 0) masks = any && leaving.masks && !covers(leaving.indices, span.first, part.start, part.entries);
    __syncwarp();
  }

  // It leaves what has been read in some turn.
  __device__ void leave(const Leaving& leaving, Four& four, int turn) const {
    if (!leaving.indices.memory) return;
    const Marks::Word mine = marks.of(turn);
    if (mine.bits == 0u) return;
    int32_t j = mine.first;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((mine.bits >> e & 1u) == 0u) continue;
      four.residual.v[e] = leaving.rest ? leaving.rest[j] : 0.0f;
      if (masks) four.velocity.v[e] = 0.0f;
      ++j;
    }
  }
};

// Takes up the gradients of entries [i, i + valid) of one tensor and returns the new residuals; adds to `nonfinite`.
__device__ inline Quad<float> accumulate4(const State& state, const Part& part, const Four& four, int64_t i,
                                          int64_t valid, int& nonfinite) {
  const int64_t at = part.start + i;
  Quad<float> residual = four.residual, velocity = four.velocity;
  const float factor = part.factor, momentum = part.momentum;
  const bool nesterov = part.nesterov;
  const Quad<float> grads = widen(four.grad, part.grad_type);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    nonfinite += !is_finite(grads.v[e]);
    const float grad = grads.v[e] * factor;
    float change = grad;
    if (state.velocity) {
      change =
          nesterov ? corrected<true>(grad, momentum, velocity.v[e]) : corrected<false>(grad, momentum, velocity.v[e]);
    }
    residual.v[e] = residual.v[e] + change;
  }
  if (state.velocity) store4(state.velocity_out + at, valid, velocity);
  store4(state.residual_out + at, valid, residual);
  return residual;
}

}  // namespace ringprune::cuda
