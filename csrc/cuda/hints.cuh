// What one step tells the next: which keys are worth collecting. It decides how fast selection is, never the result.

#pragma once

#include <cmath>

#include "selection.h"
#include "warp.cuh"

namespace ringprune::cuda {

constexpr uint32_t kNone = 0xffffffffu;  // a hint that no key reaches
constexpr uint32_t kAboveZero = 1u;      // a hint that every key reaches that may be selected
constexpr uint32_t kStep = 1u << 20;     // an eighth of a power of two: how far a hint goes down in the dark

// Margins in 1024ths of the count: the next hint is the key at rank margin * count; see csrc/cpu/selector.cpp.
constexpr int64_t kFirstMargin = 1434;   // 1.4
constexpr int64_t kSteadyMargin = 1178;  // 1.15, where scores hardly change; below 1 where all of them grow
constexpr int64_t kLeastMargin = 16;
constexpr int64_t kMostMargin = 2560;  // 2.5

// The smallest key worth collecting. Without a hint that is none, but where there is room for all it is every one.
__device__ inline uint32_t floor_of(const Bucket& bucket, int32_t i) {
  const Part& part = bucket.parts.rows[i];
  if (part.count == 0 || !bucket.hints) return kNone;
  if (bucket.hints[2 * i] > 0) return static_cast<uint32_t>(bucket.hints[2 * i]);
  return part.room >= part.entries ? kAboveZero : kNone;
}

// Whether what was collected holds everything to be selected.
__device__ inline bool serves(const Part& part, uint32_t floor, uint32_t found) {
  const bool enough = found >= static_cast<uint32_t>(part.count) || floor == kAboveZero;
  return floor != kNone && enough && found <= static_cast<uint32_t>(part.room);
}

__device__ inline int64_t clamped(int64_t margin) { return min(max(margin, kLeastMargin), kMostMargin); }

__device__ inline int64_t margin_of(const Bucket& bucket, int32_t i) {
  const int64_t margin = bucket.hints ? bucket.hints[2 * i + 1] : 0;
  return margin > 0 ? clamped(margin) : kFirstMargin;
}

// The rank a margin stands for; the root allows for chance where counts are small.
__device__ inline int64_t rank_of(int64_t count, int64_t margin) {
  const auto chance = static_cast<int64_t>(2.5f * sqrtf(static_cast<float>(count))) + 5;
  return ceil_div<int64_t>((count + chance) * margin, 1024);
}

// The margin for the next time. It rises at once to what would have been needed, and falls slowly, for a miss costs
// more than some candidates - but quickly where all scores grow.
__device__ inline int64_t next_margin(const Bucket& bucket, int32_t i, bool recollect) {
  const int64_t margin = margin_of(bucket, i), count = bucket.parts.rows[i].count, found = bucket.progress[i].found;
  const int32_t key = bucket.hints ? bucket.hints[2 * i] : 0;
  if (key <= 0) return margin;
  if (recollect) return clamped(found < count ? max(margin * 5 / 4, kSteadyMargin) : margin * 2 / 3);
  if (key == static_cast<int32_t>(kAboveZero)) return margin;
  const int64_t needed = kSteadyMargin * rank_of(count, margin) / max(found, int64_t{1});
  const int64_t excess = margin - needed;
  return clamped(excess > 0 ? margin - excess / (excess > margin / 2 ? 16 : 64) : needed);
}

// The rank whose key is the next hint.
__device__ inline uint32_t hint_rank(const Bucket& bucket, int32_t i, bool recollect) {
  const int64_t rank = rank_of(bucket.parts.rows[i].count, next_margin(bucket, i, recollect));
  return static_cast<uint32_t>(min(max(rank, int64_t{1}), int64_t{kNone - 1}));
}

// A hint that reaches deeper than `key`, where nothing is known below it.
__device__ inline uint32_t below(uint32_t key) { return key > kStep ? key - kStep : kAboveZero; }

// Keeps hint, margin and tally of a tensor that has been selected from. One thread of its last block.
__device__ inline void remember(const Bucket& bucket, int32_t i) {
  if (!bucket.hints) return;
  const Progress& progress = bucket.progress[i];
  const auto count = static_cast<uint32_t>(bucket.parts.rows[i].count);
  const bool cold = bucket.hints[2 * i] <= 0;
  const bool missed = !cold && progress.recollect && progress.found < count;
  add_to(&bucket.tally[0], 1);
  if (cold) add_to(&bucket.tally[1], 1);
  if (missed) add_to(&bucket.tally[2], 1);
  if (!cold && !missed && progress.recollect) add_to(&bucket.tally[3], 1);

  const int64_t margin = next_margin(bucket, i, progress.recollect);
  uint32_t hint = max(progress.hint, kAboveZero);
  // interpolation must not miss what a margin of 1 or more is to hold
  if (!progress.all && rank_of(count, margin) >= count) hint = min(hint, progress.threshold);
  bucket.hints[2 * i] = static_cast<int32_t>(hint);
  bucket.hints[2 * i + 1] = static_cast<int32_t>(margin);
}

}  // namespace ringprune::cuda
