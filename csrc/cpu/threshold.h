// The exact threshold among the candidates of one tensor, and the hint it leaves for the next step.

#pragma once

#include <c10/util/ArrayRef.h>

#include <vector>

#include "candidates.h"

namespace ringprune {

// The candidates of one part that are selected: those above the threshold, and the first `ties` of those equal to it.
struct Share {
  int64_t above = 0;
  int64_t equal = 0;
  int64_t ties = 0;

  int64_t selected() const { return above + ties; }
};

struct Threshold {
  uint32_t key = 1;
  uint32_t next_hint = 1;
  std::vector<Share> shares;  // one per part
};

// Finds the `count`-th largest key of a tensor's candidates, or takes them all where there are no more than that. The
// next hint is the key of rank `rank`, as near as the candidates tell.
Threshold find_threshold(const Loops& loop, c10::ArrayRef<Part> parts, int64_t count, int64_t rank);

// The key of a rank (1 is the largest) among some keys; 0 where fewer than that are above 0.
uint32_t key_of_rank(const uint32_t* keys, int64_t count, int64_t rank);

// Writes the selected positions of one part.
void emit(const Loops& loop, const Part& part, uint32_t threshold, Share share, int32_t* to);

}  // namespace ringprune
