// The work of accumulate on four neighbouring entries.

#pragma once

#include "../arithmetic.h"
#include "entries.cuh"
#include "kernels.h"

namespace ringprune::cuda {

// Takes up the gradients of entries [i, i + valid) of one tensor and returns the new residuals; adds to `nonfinite`.
__device__ inline Quad<float> accumulate4(const State& state, const Part& part, int64_t i, int64_t valid,
                                          int& nonfinite) {
  const int64_t at = part.start + i;
  const Type type = part.grad_type;
  const Packed packed = load_packed(part.grad, type, i, valid);
  Quad<float> residual = load4(state.residual + at, valid);
  Quad<float> velocity{};
  if (state.velocity) velocity = load4(state.velocity + at, valid);
  const float factor = part.factor, momentum = part.momentum;
  const bool nesterov = part.nesterov;
  const Quad<float> grads = widen(packed, type);
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
