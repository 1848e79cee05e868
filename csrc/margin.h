// How hints are aimed, the same on every device (docs/design.md, Selection).
//
// A hint is the key of rank margin * count, and the margin follows what is seen. Margins are in 1024ths.

#pragma once

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace ringprune {

constexpr int64_t kMarginUnit = 1024;
constexpr int64_t kFirstMargin = 1331;   // 1.3
constexpr int64_t kSteadyMargin = 1280;  // 1.25, where scores hardly change; below 1 where all of them grow
constexpr int64_t kLeastMargin = 1;
constexpr int64_t kMostMargin = 2560;  // 2.5

C10_HOST_DEVICE inline int64_t clamped_margin(int64_t margin) {
  return margin < kLeastMargin ? kLeastMargin : margin > kMostMargin ? kMostMargin : margin;
}

// The margin that is kept with a hint; 0 and less stand for the first.
C10_HOST_DEVICE inline int64_t margin_of(int64_t kept) { return kept > 0 ? clamped_margin(kept) : kFirstMargin; }

// The rank a hint is aimed at; the root allows for chance, which is large where ranks are small.
C10_HOST_DEVICE inline int64_t rank_of(int64_t count, int64_t margin) {
  const double aim = static_cast<double>(count) * static_cast<double>(margin) / kMarginUnit;
  return static_cast<int64_t>(aim + 3.0 * std::sqrt(aim) + 6.0);
}

// The margin that would have served at a step at which a hint aimed at `rank` let `candidates` through.
C10_HOST_DEVICE inline int64_t needed_margin(int64_t rank, int64_t candidates) {
  return clamped_margin(kSteadyMargin * rank / (candidates < 1 ? 1 : candidates));
}

// The margin after a step that went well: it rises at once and falls slowly, for a miss costs more than candidates do.
C10_HOST_DEVICE inline int64_t next_margin(int64_t margin, int64_t needed) {
  return needed >= margin ? needed : margin - (margin - needed) / 32;
}

// The margin after a miss or an overflow: down only half of the way, on a scale of ratios, for what one step grew by is
// a poor forecast.
C10_HOST_DEVICE inline int64_t mended_margin(int64_t margin, int64_t needed) {
  return needed >= margin ? needed : static_cast<int64_t>(std::sqrt(static_cast<double>(needed * margin)));
}

// The hint below one that let `candidates` through, of which the smallest selected, the `count`-th, has the key
// `threshold`, for a rank beyond them: keys fall with the logarithm of the rank, as in any tail that thins out
// exponentially; never by more than an octave.
C10_HOST_DEVICE inline uint32_t hint_below(uint32_t hint, int64_t candidates, uint32_t threshold, int64_t count,
                                           int64_t rank) {
  constexpr double kMost = 1 << 23;
  if (hint <= 1) return 1;  // everything above 0 has been seen
  const double seen = std::log(static_cast<double>(candidates) / static_cast<double>(count));
  const double wanted = std::log(static_cast<double>(rank) / static_cast<double>(candidates));
  const double step = seen > 0 ? (threshold - hint) * wanted / seen : kMost / 8;
  const double key = hint - (step < kMost ? step : kMost);
  return key > 1.0 ? static_cast<uint32_t>(key) : 1;
}

}  // namespace ringprune
