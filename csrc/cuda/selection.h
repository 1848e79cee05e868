// Exact selection on the device: what its kernels share, and in which order they run.
//
//   collect      entries with a key not below the tensor's hint go into the tensor's slots     (with accumulate only)
//   digit 0      count the keys in 2048 bins, find that of the threshold; where the slots are  ) of the slots,
//                few enough for one block, it goes on to the threshold at once                 )
//   recollect    where the slots did not serve: collect again, from this bin on                ) or, where they do
//   digit 1, 2   the same with the bin's keys in finer bins, then with single keys             ) not serve, of all
//   write        positions in order; among equals the lowest                                   ) entries
//
// For a small bucket, where launches take longer than work, all after `collect` is one kernel, and does not recollect.
//
// What is launched depends on sizes alone, and every kernel finds out on the device what there is to do, so nothing
// waits for the device and a bucket's launches are the same every time: they may be captured into a graph. Blocks of
// one tensor meet in counters (integers, where order does not matter); the last to come takes the decision for all.
// Where blocks wait for others of their kernel, these come before them in an order in which they have begun to run.

#pragma once

#include <c10/macros/Macros.h>

#include "parts.h"

namespace ringprune::cuda {

constexpr int kBins = 2048;  // what 11 bits can tell apart

constexpr uint32_t kChunk = 4;  // keys that are copied as one; a tensor's slots begin with a whole one

constexpr uint32_t kDigits = 3;  // as many are known then as are needed, or more

// What is known of a tensor's selection so far; all zero before.
struct alignas(16) Progress {
  uint64_t outcome;    // at the end; see outcome_of
  uint32_t found;      // keys not below the hint, those included for which there was no slot
  uint32_t recollect;  // whether these do not serve: too few, or no room for all
  uint32_t collected;  // the same as `found` of the second time
  uint32_t digits;     // of the threshold that are known
  uint32_t all;        // whether everything that is above zero, or in the slots, is selected
  uint32_t threshold;  // the smallest key selected is not below it,
  uint32_t bits;       // and above it by less than 2^bits
  uint32_t rank;       // how many entries of this range are selected
  uint32_t selected;
  uint32_t hint;     // for the next time
  uint32_t arrived;  // blocks, see arrives_last
};

// Threshold, and how many entries equal to it are selected, in one word, which is not zero. All are above 0.
C10_HOST_DEVICE constexpr uint64_t outcome_of(uint32_t threshold, uint32_t ties) {
  return uint64_t{1} << 63 | uint64_t{threshold} << 32 | ties;
}

// The slots that a tile's candidates are in, counted from its tensor's first.
struct Run {
  uint32_t first;
  uint32_t size;
};

// Numbers of entries above and equal to a threshold, in one word: two counters that are added as one. Neither reaches
// 2^31, for a bucket has fewer entries.
using Counts = uint64_t;

// The tables of one call, all on the device.
struct Bucket {
  Parts parts;
  Progress* progress;    // per tensor
  uint32_t* histograms;  // kBins each, all zero before and afterwards
  uint32_t* keys;        // per slot, in whole chunks
  uint16_t* entries;     // per slot: which entry of its tile
  Run* runs;             // per tile
  Counts* strip_counts;  // per strip, all zero before; see Announced
  uint32_t* begun;       // how many blocks of the last kernel have, zero before
  uint32_t* left;        // how many of the digits' blocks are done, zero before; at once
  bool at_once;          // whether one kernel does all after collecting
  int32_t* hints;        // per tensor a key and a margin; null: there are none
  int64_t* tally;        // null as hints are
  int32_t* positions;
};

}  // namespace ringprune::cuda
