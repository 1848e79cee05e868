// The loops for any processor.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "../arithmetic.h"
#include "loops.h"
#include "tree_sum.h"

#define RINGPRUNE_SET portable

namespace ringprune::portable {
namespace {

uint64_t at_least(const uint32_t* keys, uint32_t least) {
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(keys[i] >= least) << i;
  return mask;
}

void compress(const uint32_t* keys, const int32_t* positions, uint32_t least, int64_t expected, int32_t* to) {
  for (const int32_t* end = to + expected; to < end; ++keys, ++positions) {
    *to = *positions;  // always, and kept where it counts: no branch to predict
    to += *keys >= least;
  }
}

void look_up(const uint32_t* table, const int32_t* at, int64_t count, int32_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(table[at[i]]);
}

void stream(const float* from, int64_t count, float* to) { std::memcpy(to, from, sizeof(float) * count); }

void fence() {}

}  // namespace
}  // namespace ringprune::portable

#include "loops_body.h"

namespace ringprune {
const Loops kPortableLoops = portable::table("portable");
}
