// The inner loops of the CPU kernels, compiled once per instruction set and chosen when the library is loaded.
//
// All instruction sets give the same bits: the arithmetic is that of arithmetic.h, entry by entry.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../arithmetic.h"
#include "../books.h"

namespace ringprune {

// Entries that the loops work on at a time, so that what they hand on stays in the first-level cache.
constexpr int64_t kBlock = 512;

// Numbers of the scores in arithmetic.h, in the order of the tables below.
enum ScoreNumber { kRatio, kMagnitude, kSum, kProduct, kScores };

// How momentum enters the residual.
enum Correction { kNoMomentum, kMomentum, kNesterov, kCorrections };

// Keys that are compared at a time, a bit for each.
constexpr int64_t kWord = 64;

// Entries from which on the caches do not hold a bucket: what is only written goes past them.
constexpr int64_t kStreamed = int64_t{1} << 22;

// Entries that were sent of a run's state, in ascending order: they are read as the rest, or 0 without one, and where
// `masked` their velocities as 0.
struct Gone {
  const int32_t* entry = nullptr;
  int64_t count = 0;
  const float* rest = nullptr;
  int64_t base = 0;  // the run's first entry, as they count
  bool masked = false;
};

// A run of at most kBlock entries of one tensor. Without momentum the velocities are not looked at. The outputs may
// be the inputs: every entry is read before it is written. Where `streams`, they are not, and are stored past the
// caches, for other threads to see after fence().
struct Run {
  const float* grad;
  const float* weight;
  const float* residual;
  const float* velocity;
  float* residual_out;
  float* velocity_out;
  int64_t count;
  float factor;
  float momentum;
  float parameter;
  bool streams;
  Gone gone;
};

// A run of at most kBlock entries of one tensor whose momentum is shared; squares are Adam's alone.
struct Shared {
  const float* average;
  float* elapsed;
  float* momentum;
  const float* weight;
  const float* own;
  const float* square;
  int64_t count;
  Pace pace;
};

struct Loops {
  const char* name;
  // Accumulates, and uses up the run; returns how many gradients are NaN or infinite.
  int64_t (*accumulate[kCorrections])(Run&);
  // The same, and writes the keys of the new residual's scores.
  int64_t (*accumulate_keys[kCorrections][kScores])(Run&, uint32_t* keys);
  // The keys of residual_out's scores alone.
  void (*keys[kScores])(const Run&, uint32_t* keys);
  void (*keys_of)(const float* scores, int64_t count, uint32_t* keys);
  void (*scores[kScores])(const Run&, float* scores);
  // Writes the keys that are >= least, and base + their index; returns how many. Reads up to a multiple of kWord keys,
  // and may write kWord entries beyond what it returns. Faster where `dense` tells whether two and more of kWord are.
  int64_t (*collect)(const uint32_t* keys, int64_t count, uint32_t least, int32_t base, bool dense, uint32_t* to,
                     int32_t* positions);
  // Bit i is set where keys[i] >= least, for i < kWord; `least` is not 0.
  uint64_t (*at_least)(const uint32_t* keys, uint32_t least);
  // Writes positions[i] where keys[i] >= least, in order: `expected` of them, which the caller has counted.
  void (*compress)(const uint32_t* keys, const int32_t* positions, uint32_t least, int64_t expected, int32_t* to);
  void (*widen_half)(const void* from, int64_t count, float* to);
  void (*widen_bfloat16)(const void* from, int64_t count, float* to);
  int64_t (*count_nonfinite)(const float* from, int64_t count);
  // The sum of squares of at most kBlock entries, by the tree of square_sum.cpp.
  double (*square_sum)(const float* from, int64_t count);
  void (*share_momentum)(const Shared&);
  void (*share_adams_momentum)(const Shared&);
  // The largest magnitude's bits.
  uint32_t (*largest_magnitude)(const float* from, int64_t count);
  // The bin of each value of a block (books.h).
  void (*sort_into_bins)(const float* from, int64_t count, int32_t base, int32_t* bins);
  // What is known of each bin, from two histograms.
  void (*resolve_bins)(const int64_t* held, const int64_t* held_besides, int32_t base, books::Bins& bins);
  // Of each value, by its bin, the code and the rest that its level leaves, which may overwrite the value. An entry
  // of the table is a level, whose lower half is the code.
  void (*round_to_levels)(const float* from, const int32_t* bins, const uint32_t* table, int64_t count, int32_t* codes,
                          float* rest);
  // Joins codes of 2 or of 4 bits, the first in the lowest bits of a byte.
  void (*join_two_bits)(const int32_t* codes, int64_t count, uint8_t* to);
  void (*join_four_bits)(const int32_t* codes, int64_t count, uint8_t* to);
  // Writes or adds the level of each such code.
  void (*decode_two_bits[2])(const uint8_t* codes, const float* levels, int64_t count, float* values);
  void (*decode_four_bits[2])(const uint8_t* codes, const float* levels, int64_t count, float* values);
  // Copies past the caches, which saves reading what is overwritten; fence() makes it visible to other threads.
  void (*stream)(const float* from, int64_t count, float* to);
  void (*fence)();
};

// Calls body(lo, count) for [lo, hi) in blocks that end at multiples of kBlock.
template <class Body>
void for_each_block(int64_t lo, int64_t hi, const Body& body) {
  while (lo < hi) {
    const int64_t count = std::min(kBlock - lo % kBlock, hi - lo);
    body(lo, count);
    lo += count;
  }
}

extern const Loops kPortableLoops;
// Clang has another pragma for this, which nobody has tried here yet.
#if defined(__x86_64__) && !defined(__clang__)
#define RINGPRUNE_X86
extern const Loops kAvx2Loops;
extern const Loops kAvx512Loops;
#endif

// The loops in use: the widest that this processor has.
const Loops& loops();

}  // namespace ringprune
