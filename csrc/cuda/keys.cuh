// Where the keys that entries are selected by come from: 31-bit numbers that compare as the scores do (arithmetic.h).

#pragma once

#include "../arithmetic.h"
#include "entries.cuh"

namespace ringprune::cuda {

// From scores that are there.
struct GivenKeys {
  const float* scores;

  __device__ Quad<uint32_t> load(const Part& part, int64_t i, int64_t valid) const {
    const Quad<float> loaded = load4(scores + part.start + i, valid);
    Quad<uint32_t> keys{};
#pragma unroll
    for (int e = 0; e < 4; ++e) keys.v[e] = key_of(loaded.v[e]);
    return keys;
  }
};

// From residual and weights; `load` reads them, `score` has the residual at hand.
template <class Score>
struct ScoredKeys {
  const float* residual;

  __device__ static Quad<float> score(const Part& part, const Quad<float>& residual, const Packed& weights) {
    const Quad<float> weight = widen(weights, part.weight_type);
    const float parameter = part.parameter;
    Quad<float> scores;
#pragma unroll
    for (int e = 0; e < 4; ++e) scores.v[e] = Score{}(residual.v[e], weight.v[e], parameter);
    return scores;
  }

  // Entries behind the end have key 0, which is never selected, whatever the score makes of two zeros.
  __device__ static Quad<uint32_t> keys(const Quad<float>& scores, int64_t valid) {
    Quad<uint32_t> keys;
#pragma unroll
    for (int e = 0; e < 4; ++e) keys.v[e] = e < valid ? key_of(scores.v[e]) : 0u;
    return keys;
  }

  __device__ Quad<uint32_t> load(const Part& part, int64_t i, int64_t valid) const {
    const Quad<float> values = load4(residual + part.start + i, valid);
    return keys(score(part, values, load_packed(part.weight, part.weight_type, i, valid)), valid);
  }
};

}  // namespace ringprune::cuda
