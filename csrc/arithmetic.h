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

// Momentum correction of one gradient: returns what is added to the residual, and updates the velocity.
template <bool kNesterov>
C10_HOST_DEVICE inline float corrected(float gradient, float momentum, float& velocity) {
  velocity = momentum * velocity + gradient;
  return kNesterov ? momentum * velocity + gradient : velocity;
}

// Importance relative to the weight (IWP, arXiv 1901.01544), damped by a floor. Other scores have the same shape.
struct RelativeImportance {
  C10_HOST_DEVICE float operator()(float residual, float weight, float floor) const {
    return std::abs(residual) / (std::abs(weight) + floor);
  }
};

// Keys that compare as the floats do: negative below positive, one zero, every NaN on top of all.
C10_HOST_DEVICE inline uint32_t ordered_key(float value) {
  constexpr uint32_t kSign = 0x80000000u;
  constexpr uint32_t kInfinity = 0x7f800000u;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t magnitude = bits & ~kSign;
  if (magnitude > kInfinity) return 0xffffffffu;
  if (magnitude == 0) return kSign;
  return (bits & kSign) ? ~bits : bits | kSign;
}

}  // namespace ringprune
