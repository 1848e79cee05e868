// What one step tells the next: which keys are worth collecting. It decides how fast selection is, never the result.

#pragma once

#include "selection.h"
#include "warp.cuh"

namespace ringprune::cuda {

constexpr uint32_t kNone = 0xffffffffu;         // a hint that no key reaches
constexpr uint32_t kAboveZero = 1u;             // a hint that every key reaches that may be selected
constexpr uint32_t kStep = 1u << 20;            // an eighth of a power of two: how far a hint goes down in the dark
constexpr int32_t kFirstMargin = 1638;          // in 1024ths: 1.6, or the key at rank 1.6 k is the next hint
constexpr int32_t kLeast = 1331, kMost = 4096;  // 1.3 and 4

// The smallest key worth collecting. Without a hint that is none, but where there is room for all it is every one.
__device__ inline uint32_t floor_of(const Bucket& bucket, int32_t i) {
  const Part& part = bucket.parts.rows[i];
  if (part.count == 0 || !bucket.hints) return kNone;
  const auto key = static_cast<uint32_t>(bucket.hints[2 * i]);
  if (key != 0u) return key;
  return part.room >= part.entries ? kAboveZero : kNone;
}

// Whether what was collected holds everything to be selected.
__device__ inline bool serves(const Part& part, uint32_t floor, uint32_t found) {
  const bool enough = found >= static_cast<uint32_t>(part.count) || floor == kAboveZero;
  return floor != kNone && enough && found <= static_cast<uint32_t>(part.room);
}

__device__ inline int32_t margin_of(const Bucket& bucket, int32_t i) {
  const int32_t margin = bucket.hints ? bucket.hints[2 * i + 1] : 0;
  return margin <= 0 ? kFirstMargin : min(max(margin, kLeast), kMost);
}

// The rank whose key is the next hint.
__device__ inline uint32_t hint_rank(const Bucket& bucket, int32_t i) {
  const int64_t count = bucket.parts.rows[i].count;
  return static_cast<uint32_t>(min(ceil_div<int64_t>(count * margin_of(bucket, i), 1024), int64_t{kNone - 1}));
}

// A hint that reaches deeper than `key`, where nothing is known below it.
__device__ inline uint32_t below(uint32_t key) { return key > kStep ? key - kStep : kAboveZero; }

// Keeps hint, margin and tally of a tensor that has been selected from. One thread of its last block.
__device__ inline void remember(const Bucket& bucket, int32_t i) {
  if (!bucket.hints) return;
  const Progress& progress = bucket.progress[i];
  const bool cold = bucket.hints[2 * i] == 0;
  const bool missed = !cold && progress.recollect && progress.found < static_cast<uint32_t>(bucket.parts.rows[i].count);
  add_to(&bucket.tally[0], 1);
  if (cold) add_to(&bucket.tally[1], 1);
  if (missed) add_to(&bucket.tally[2], 1);
  if (!cold && !missed && progress.recollect) add_to(&bucket.tally[3], 1);

  const int32_t margin = margin_of(bucket, i);
  const int32_t decayed = max(margin - max((margin - kLeast) / 64, 1), kLeast);
  const uint32_t hint = progress.all ? progress.hint : min(progress.hint, progress.threshold);
  bucket.hints[2 * i] = static_cast<int32_t>(max(hint, kAboveZero));
  bucket.hints[2 * i + 1] = missed ? min(margin * 5 / 4, kMost) : (cold ? margin : decayed);
}

}  // namespace ringprune::cuda
