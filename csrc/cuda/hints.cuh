// What one step tells the next: which keys are worth collecting. It decides how fast selection is, never the result.

#pragma once

#include <cmath>

#include "../margin.h"
#include "selection.h"
#include "warp.cuh"

namespace ringprune::cuda {

constexpr uint32_t kNone = 0xffffffffu;  // a hint that no key reaches
constexpr uint32_t kAboveZero = 1u;      // a hint that every key reaches that may be selected

// What is kept of a tensor between steps.
struct Hint {
  int32_t key;  // none where it is not above zero
  int32_t margin;
};

__device__ inline Hint hint_of(const Bucket& bucket, int32_t i) {
  if (!bucket.hints) return {0, 0};
  return {bucket.hints[2 * i], bucket.hints[2 * i + 1]};
}

// The smallest key worth collecting. Without a hint that is none, but where there is room for all it is every one.
__device__ inline uint32_t floor_of(const Bucket& bucket, const Part& part, const Hint& hint) {
  if (part.count == 0 || !bucket.hints) return kNone;
  if (hint.key > 0) return static_cast<uint32_t>(hint.key);
  return part.room >= part.entries ? kAboveZero : kNone;
}

// Whether what was collected holds everything to be selected.
__device__ inline bool serves(const Part& part, uint32_t floor, uint32_t found) {
  const bool enough = found >= static_cast<uint32_t>(part.count) || floor == kAboveZero;
  return floor != kNone && enough && found <= static_cast<uint32_t>(part.room);
}

// What the next hint is aimed at.
struct Aim {
  int64_t margin;
  uint32_t rank;
};

// The next one. `found` candidates were collected; whether these did not serve.
__device__ inline Aim aim_after(const Part& part, const Hint& hint, uint32_t found, bool recollect) {
  int64_t margin = margin_of(hint.margin);
  if (hint.key > static_cast<int32_t>(kAboveZero)) {
    const int64_t needed = needed_margin(rank_of(part.count, margin), found);
    margin = recollect ? mended_margin(margin, needed) : next_margin(margin, needed);
  }
  const int64_t rank = rank_of(part.count, margin);
  return {margin, static_cast<uint32_t>(min(max(rank, int64_t{1}), int64_t{kNone - 1}))};
}

// What is known of a tensor's next hint as soon as its candidates are collected.
struct Outlook {
  Hint before;
  uint32_t found;
  bool recollect;
  Aim aim;

  Outlook() = default;
  __device__ Outlook(const Bucket& bucket, int32_t i)
      : before(hint_of(bucket, i)), found(read_now(bucket.progress[i].found)) {
    const Part& part = bucket.parts.rows[i];
    recollect = !serves(part, floor_of(bucket, part, before), found);
    aim = aim_after(part, before, found, recollect);
  }
};

// Keeps hint, margin and tally of a tensor that has been selected from, maybe by other blocks of the same kernel. One
// thread of all.
__device__ inline void remember(const Bucket& bucket, int32_t i, const Outlook& outlook) {
  const Progress& progress = bucket.progress[i];
  const uint32_t threshold = read_now(progress.threshold);
  const bool all = read_now(progress.all);
  uint32_t hint = max(read_now(progress.hint), kAboveZero);

  const auto count = static_cast<uint32_t>(bucket.parts.rows[i].count);
  const bool recollect = outlook.recollect, cold = outlook.before.key <= 0;
  const bool missed = !cold && recollect && outlook.found < count;
  add_to(&bucket.tally[0], 1);
  if (cold) add_to(&bucket.tally[1], 1);
  if (missed) add_to(&bucket.tally[2], 1);
  if (!cold && !missed && recollect) add_to(&bucket.tally[3], 1);

  // interpolation must not miss what a margin of 1 or more is to hold
  if (!all && outlook.aim.rank >= count) hint = min(hint, threshold);
  bucket.hints[2 * i] = static_cast<int32_t>(hint);
  bucket.hints[2 * i + 1] = static_cast<int32_t>(outlook.aim.margin);
}

}  // namespace ringprune::cuda
