// From what size on selection goes another way. They decide how fast it is, never the result.

#pragma once

#include <cstdint>

namespace ringprune::cuda {

#ifdef RINGPRUNE_TINY_SIZES  // all ways with small tensors, for tests/ops/test_emulation.py
constexpr uint32_t kOneBlock = 24, kSlotsEach = 16, kMostWorkers = 3, kFewSlots = 40, kFew = 4, kHeld = 8;
constexpr int64_t kAtOnce = 5'000, kMostShares = 100'000;
#else
constexpr uint32_t kOneBlock = 16'384;  // slots that one block looks through before several have found each other
constexpr uint32_t kSlotsEach = 4'096;  // of more slots, those that are worth a block of their own
constexpr uint32_t kMostWorkers = 64;   // blocks, for they have to wait for each other
constexpr uint32_t kFewSlots = 98'304;  // that one block looks through sooner than two kernels are done
constexpr uint32_t kFew = 512;          // keys that are compared each with each
constexpr uint32_t kHeld = 13 * 1'024;  // that a block holds in shared memory, which is 64 KiB with its other variables

// Entries of a bucket up to which one kernel selects at once, without collecting again where the first candidates do
// not serve: to read so few a few times more costs less than kernels that mostly have nothing to do.
constexpr int64_t kAtOnce = 2'000'000;

// As many blocks as can read all entries at the speed of memory; with one for each of many tensors they run at once.
constexpr int64_t kMostShares = 128;
#endif

}  // namespace ringprune::cuda
