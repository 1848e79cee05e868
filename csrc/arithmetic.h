// The arithmetic on one entry, written once for every kernel on CPU and CUDA.
//
// Each operation is rounded to float32 by itself; compile with -ffp-contract=off (nvcc: -fmad=false), or the bits
// differ from the torch references and the ranks choose different indices.

#pragma once

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ringprune {

// What is added to the residual of one gradient, with the velocity that it has been added to.
template <bool kNesterov>
C10_HOST_DEVICE inline float added(float gradient, float momentum, float velocity) {
  return kNesterov ? momentum * velocity + gradient : velocity;
}

// Momentum correction of one gradient: returns what is added to the residual, and updates the velocity.
template <bool kNesterov>
C10_HOST_DEVICE inline float corrected(float gradient, float momentum, float& velocity) {
  velocity = momentum * velocity + gradient;
  return added<kNesterov>(gradient, momentum, velocity);
}

// The scores of ringprune/ops/importance.py: each sees one residual, its weight and its tensor's parameter.
struct Ratio {
  C10_HOST_DEVICE float operator()(float residual, float weight, float parameter) const {
    return std::abs(residual) / (std::abs(weight) + parameter);
  }
};
struct Magnitude {
  C10_HOST_DEVICE float operator()(float residual, float, float) const { return std::abs(residual); }
};
struct Sum {
  C10_HOST_DEVICE float operator()(float residual, float weight, float parameter) const {
    return std::abs(weight) + std::abs(residual) * parameter;
  }
};
struct Product {
  C10_HOST_DEVICE float operator()(float residual, float weight, float) const {
    return std::abs(weight) * std::abs(residual);
  }
};

// The numbers with which one tensor's momentum is shared (ringprune/ops/share_momentum.py); for SGD the first four.
struct Pace {
  float interval;
  float time;
  float keep;
  bool whole;
  float decay = 0.0f;
  float root = 0.0f;
  float epsilon = 0.0f;
  float factor = 0.0f;
};

// Shares the momentum of one entry, of which `average` was exchanged, if it is not 0 or the tensor is exchanged whole.
template <bool kAdam>
C10_HOST_DEVICE inline void share(float average, float& elapsed, float& momentum, float weight, float own, float square,
                                  const Pace& pace) {
  const float time = elapsed + pace.interval;
  float said = average / time, way = (weight - own) / pace.time;
  if constexpr (kAdam) {
    const float decayed = pace.decay * weight;
    said -= decayed;
    way -= decayed;
  }
  float gap = said - pace.keep * way;
  if constexpr (kAdam) gap = gap * (std::sqrt(square) / pace.root + pace.epsilon) * pace.factor;
  const bool arrived = pace.whole | (average != 0.0f);
  momentum = (arrived & (time > 0.0f) & (pace.time > 0.0f)) ? pace.keep * momentum + gap : momentum;
  elapsed = arrived ? 0.0f : time;
}

// Keys below 2^31 that compare as the scores do. Every NaN is the same key on top of all, whatever its sign and
// payload, for those differ between machines; 0 is the key of what is never selected.
constexpr uint32_t kNaNKey = 0x7f800001u;
constexpr int kKeyBits = 31;
C10_HOST_DEVICE inline uint32_t key_of(float score) {
  constexpr uint32_t kSign = 0x80000000u;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  const uint32_t positive = (bits & kSign) ? 0u : bits;
  return (bits & ~kSign) >= kNaNKey ? kNaNKey : positive;
}

// Fills what is left of a tensor's positions: PAD of ringprune/ops/select.py.
constexpr int32_t kPad = -1;

}  // namespace ringprune
