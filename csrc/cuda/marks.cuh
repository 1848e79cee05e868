// Which entries of a tile are in a set of positions: indices that ascend, so that those of a tile lie side by side.
//
// Whether they ascend cannot be checked without waiting for the device. Where they do not, anything may be found, but
// only indices that are there, at entries that are there, and in as much time.

#pragma once

#include "kernels.h"
#include "tiles.cuh"

namespace ringprune::cuda {

// How many of the indices are below a position. All lanes look for it together, at kLanes indices at a time.
__device__ inline int32_t count_below(const Indices& indices, int32_t position) {
  uint32_t low = 0, size = static_cast<uint32_t>(indices.count);  // so many are, and at most `size` more
  while (size > 0) {
    const uint32_t each = ceil_div(size, uint32_t{kLanes}), last = (lane() + 1) * each - 1;
    const bool is_below = last < size && indices.memory[low + last] < position;
    const uint32_t below = __popc(__ballot_sync(kAllLanes, is_below)) * each;
    low += below;
    size = min(each - 1, size - below);
  }
  return static_cast<int32_t>(low);
}

// Neighbouring positions, a tile's at most, and the first index that may be among them.
struct Span {
  uint32_t begin;
  uint32_t size;
  int32_t first;

  // The positions from entry `at` of a tensor on that begins at `start`.
  __device__ Span(const Indices& indices, int64_t start, int64_t entries, int64_t at)
      : begin(static_cast<uint32_t>(start + at)),
        size(static_cast<uint32_t>(min(entries - at, int64_t{kTile}))),
        first(count_below(indices, static_cast<int32_t>(begin))) {}
};

// Calls use(entry, read(j)) for the j-th index, for all that lie in the span, `entry` counted from its begin. Lanes
// have one each, and read `kTogether` at once. Whether there was any, which all lanes know.
template <int kTogether, class Read, class Use>
__device__ bool for_each_index(const Indices& indices, const Span& span, const Read& read, const Use& use) {
  static_assert(kTile % (kTogether * kLanes) == 0);
  const auto count = static_cast<int32_t>(indices.count) - span.first;
  uint32_t any = 0;
  for (int32_t turn = 0; turn < kTile; turn += kTogether * kLanes) {
    uint32_t entries[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int32_t i = turn + k * kLanes + lane();
      entries[k] = i < count ? static_cast<uint32_t>(indices.memory[span.first + i]) - span.begin : span.size;
    }
    decltype(read(0)) values[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (entries[k] < span.size) values[k] = read(span.first + turn + k * kLanes + lane());
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (entries[k] < span.size) use(entries[k], values[k]);
    }
    any |= __ballot_sync(kAllLanes, entries[0] < span.size);
    if (__ballot_sync(kAllLanes, entries[kTogether - 1] < span.size) != kAllLanes) break;
  }
  return any != 0;
}

// Whether the indices cover all positions of a tensor, of which the j-th lies in it: where they ascend, the tensor's
// first position is then just as far before j, and its last just as far behind, as the positions lie apart.
__device__ inline bool covers(const Indices& indices, int64_t j, int64_t start, int64_t entries) {
  const int64_t first = j - (indices.memory[j] - start), last = first + entries - 1;
  return first >= 0 && last < indices.count && indices.memory[first] == start &&
         indices.memory[last] == start + entries - 1;
}

// A bit for each entry of a tile, and of each word which index its first bit is.
struct Marks {
  static constexpr int kWords = kTile / 32;
  static_assert(kWords <= kLanes);
  struct alignas(8) Word {
    uint32_t bits;
    int32_t first;
  };
  Word words[kWords];

  // Sets the bits of the indices in the span; whether there are any. All lanes together.
  __device__ bool set(const Indices& indices, const Span& span) {
    if (lane() < kWords) words[lane()] = {0u, 0};
    __syncwarp();
    const auto mark = [&](uint32_t entry, bool) { atomicOr(&words[entry / 32].bits, 1u << entry % 32); };
    if (!for_each_index<1>(indices, span, [](int32_t) { return true; }, mark)) return false;
    __syncwarp();
    const int own = lane() < kWords ? __popc(words[lane()].bits) : 0;
    const int before = warp_scan(own) - own;
    if (lane() < kWords) words[lane()].first = span.first + before;
    __syncwarp();
    return true;
  }

  // The bits of a lane's four neighbours in some turn, and which index the first of them is.
  __device__ Word of(int turn) const {
    const Word word = words[turn * (kTurn / 32) + lane() / 8];
    const int shift = lane() % 8 * 4;
    return {word.bits >> shift & 15u, word.first + __popc(word.bits & ((1u << shift) - 1u))};
  }
};

}  // namespace ringprune::cuda
