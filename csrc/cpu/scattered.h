// Entries at the indices of a set lie far apart: each may wait for memory by itself.

#pragma once

#include <cstdint>

namespace ringprune {

constexpr int64_t kAhead = 32;  // indices: far enough for their lines to arrive, near enough for them to stay
// Indices worth a thread of their own: fewer than of contiguous entries, since each may wait for lines of memory.
constexpr int64_t kFewest = 2048;

}  // namespace ringprune
