// Candidates: the entries of a tensor whose key is not below its hint, collected while a kernel passes over it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "loops.h"

namespace ringprune {

// Counts of candidates by how far their key is above the hint. Two octaves are told apart in fine steps, since the
// threshold is seldom further from a hint; without a hint the bins divide all keys evenly.
struct Histogram {
  static constexpr uint32_t kBins = 2048;
  static constexpr int kFineShift = 13;    // of 23 bits of mantissa: a bin is a thousandth of an octave
  static constexpr int kCoarseShift = 20;  // of 31 bits: all of them

  uint32_t base;
  int shift;
  std::array<uint32_t, kBins> bins;

  void clear(uint32_t hint) {
    base = hint > 1 ? hint : 0;
    shift = hint > 1 ? kFineShift : kCoarseShift;
    bins.fill(0);
  }
  uint32_t bin(uint32_t key) const { return std::min((key - base) >> shift, kBins - 1); }
  // The lowest key of a bin.
  uint32_t edge(uint32_t bin) const { return base + (bin << shift); }
  void count(const uint32_t* keys, int64_t number) {
    for (int64_t i = 0; i < number; ++i) ++bins[bin(keys[i])];
  }

  // The bin of the key of a rank (1 is the largest), and the rank inside the bin. The rank must not exceed the sum.
  struct Place {
    uint32_t bin;
    int64_t rank;
  };
  Place find(int64_t rank) const {
    uint32_t bin = kBins - 1;
    while (bin > 0 && rank > bins[bin]) rank -= bins[bin--];
    return {bin, rank};
  }
  // The key of a rank, interpolated inside its bin; the last bin has no end, so its lower edge has to do.
  uint32_t estimate(int64_t rank) const {
    const Place place = find(rank);
    if (place.bin + 1 == kBins || bins[place.bin] == 0) return edge(place.bin);
    const double below = 1.0 - static_cast<double>(place.rank) / bins[place.bin];
    return edge(place.bin) + static_cast<uint32_t>(below * (1 << shift));
  }
};

// The part of a tensor that one task passes over, flat positions [lo, hi), and the candidates it found there.
//
// Two threads add to parts that are neighbours in memory: in one cache line, or one that is fetched with its neighbour,
// each would wait for the other at every block.
struct alignas(128) Part {
  // Fewer candidates than this are put in order as they are.
  static constexpr int64_t kFew = 128;
  // A block more than there is room for, and what collect() writes beyond.
  static constexpr int64_t kSlack = kBlock + 2 * kWord;
  // With this hint nothing is collected.
  static constexpr uint32_t kNothing = 0xffffffffu;

  int64_t tensor;
  int64_t lo;
  int64_t hi;
  int64_t room;  // candidates it may hold; there is memory for kSlack more
  uint32_t hint = kNothing;
  uint32_t* keys = nullptr;
  int32_t* positions = nullptr;
  Histogram* histogram = nullptr;
  int64_t count = 0;
  bool overflowed = false;
  bool counted = false;  // the histogram is filled

  // Adds those of the next `number` <= kBlock keys; keys[number ...] may be overwritten up to a multiple of 64.
  void add(const Loops& loop, uint32_t* next, int64_t number, int64_t position) {
    if (hint == kNothing || overflowed) return;
    std::memset(next + number, 0, sizeof(uint32_t) * ((kWord - number % kWord) % kWord));
    const bool dense = count * kWord > 2 * (position - lo);  // as it has been so far
    count += loop.collect(next, number, hint, static_cast<int32_t>(position), dense, keys + count, positions + count);
    overflowed = count > room;
  }

  // All candidates are there: pads the keys to a multiple of 64, and counts them while they are in the cache.
  void close() {
    if (hint == kNothing || overflowed) return;
    std::memset(keys + count, 0, sizeof(uint32_t) * kWord);
    if (count <= kFew) return;
    histogram->clear(hint);
    histogram->count(keys, count);
    counted = true;
  }
};

}  // namespace ringprune
