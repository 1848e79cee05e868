// Sums in one fixed order: neighbours in pairs, then the sums of neighbours, and so on.

#pragma once

#include <cstdint>

namespace ringprune {

// Sums `x` in place; an entry without neighbour is kept, as adding zero would. Inlined, so that the caller's
// instruction set is used.
[[gnu::always_inline]] inline double tree_sum(double* x, int64_t count) {
  if (count == 0) return 0.0;
  for (; count > 1; count = (count + 1) / 2) {
#pragma omp simd  // what is written has been read: x[i] by no later iteration
    for (int64_t i = 0; i < count / 2; ++i) x[i] = x[2 * i] + x[2 * i + 1];
    if (count % 2) x[count / 2] = x[count - 1];
  }
  return x[0];
}

}  // namespace ringprune
