// From what size on selection goes another way. They decide how fast it is, never the result.

#pragma once

#include <cstdint>

namespace ringprune::cuda {

#ifdef RINGPRUNE_TINY_SIZES  // all ways with small tensors, for tests/ops/test_emulation.py
constexpr uint32_t kSlotsEach = 16, kFewSlots = 40, kFew = 4;
constexpr int kGroup = 2;
constexpr int64_t kWorthCollecting = 5'000, kWorthSharing = 1'000, kMostShares = 100'000;
#else
constexpr uint32_t kSlotsEach = 16'384;  // slots that are worth a block of their own
constexpr uint32_t kFewSlots = 98'304;   // that one block looks through sooner than two kernels are done
constexpr uint32_t kFew = 512;           // keys that are compared each with each
constexpr int kGroup = 2'048;            // strips of a tensor whose counts a block adds up, rather than wait for a sum

// Entries of a tensor from which on several blocks are to look for its threshold to the end, were its first candidates
// not to serve. For smaller ones kernels that mostly have nothing to do would cost more than waiting for one block.
constexpr int64_t kWorthSharing = 131'072;

// Entries of a bucket from which on it pays, likewise, to collect again.
constexpr int64_t kWorthCollecting = 2'000'000;

// About as many blocks as run at once on a large GPU, where all entries have to be read.
constexpr int64_t kMostShares = 256;
#endif

}  // namespace ringprune::cuda
