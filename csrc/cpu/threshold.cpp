// One radix digit by histogram, the rest by std::nth_element among the few candidates that share the digit.

#include "threshold.h"

#include <bit>
#include <functional>

#include "../arithmetic.h"
#include "../margin.h"

namespace ringprune {
namespace {

// Keys in [low, high), above all other candidates below low and below all others from high on.
struct Slice {
  uint32_t low = 1;
  uint32_t high = uint32_t{1} << kKeyBits;
};

Histogram merge(c10::ArrayRef<Part> parts) {
  Histogram merged;
  merged.clear(parts.front().hint);
  for (const Part& part : parts) {
    if (part.counted) {
      for (uint32_t i = 0; i < Histogram::kBins; ++i) merged.bins[i] += part.histogram->bins[i];
    } else {
      merged.count(part.keys, part.count);
    }
  }
  return merged;
}

// The part's keys inside the slice are appended to `inside`; returns how many of its keys are above it.
int64_t gather(const Loops& loop, const Part& part, const Slice& slice, std::vector<uint32_t>& inside) {
  int64_t above = 0;
  for (int64_t i = 0; i < part.count; i += kWord) {
    const uint64_t over = loop.at_least(part.keys + i, slice.high);
    above += std::popcount(over);
    for (uint64_t mask = loop.at_least(part.keys + i, slice.low) & ~over; mask; mask &= mask - 1) {
      inside.push_back(part.keys[i + std::countr_zero(mask)]);
    }
  }
  return above;
}

// Deals the ties that are taken to the parts in order: the lowest positions win.
void deal(std::vector<Share>& shares, int64_t ties) {
  for (Share& share : shares) {
    share.ties = std::min(share.equal, ties);
    ties -= share.ties;
  }
}

uint32_t nth_largest(std::vector<uint32_t>& keys, int64_t rank) {
  std::nth_element(keys.begin(), keys.begin() + (rank - 1), keys.end(), std::greater<>());
  return keys[rank - 1];
}

}  // namespace

Threshold find_threshold(const Loops& loop, c10::ArrayRef<Part> parts, int64_t count, int64_t rank) {
  Threshold result;
  result.shares.resize(parts.size());
  int64_t candidates = 0;
  for (const Part& part : parts) candidates += part.count;
  const uint32_t hint = parts.front().hint;
  if (candidates <= count) {
    for (size_t i = 0; i < parts.size(); ++i) result.shares[i].above = parts[i].count;
    result.key = 0;
    result.next_hint = hint_below(hint, candidates, hint, candidates, rank);
    return result;
  }

  Slice slice;
  int64_t rest = count;
  const bool many = candidates > 2 * Part::kFew;
  if (many) {
    const Histogram histogram = merge(parts);
    const Histogram::Place place = histogram.find(count);
    slice.low = std::max<uint32_t>(1, histogram.edge(place.bin));
    if (place.bin + 1 < Histogram::kBins) slice.high = std::min(slice.high, histogram.edge(place.bin + 1));
    rest = place.rank;
    result.next_hint = rank <= candidates ? histogram.estimate(rank) : 0;
  }
  std::vector<uint32_t> inside;
  inside.reserve(many ? Part::kFew : candidates);
  std::vector<size_t> bounds{0};
  for (size_t i = 0; i < parts.size(); ++i) {
    result.shares[i].above = gather(loop, parts[i], slice, inside);
    bounds.push_back(inside.size());
  }
  std::vector<uint32_t> order = inside;
  result.key = nth_largest(order, rest);
  if (!many) result.next_hint = rank <= candidates ? nth_largest(order, rank) : 0;
  if (result.next_hint == 0) result.next_hint = hint_below(hint, candidates, result.key, count, rank);
  if (rank >= count) result.next_hint = std::min(result.next_hint, result.key);  // where it was interpolated

  for (size_t i = 0; i < parts.size(); ++i) {
    Share& share = result.shares[i];
    for (size_t j = bounds[i]; j < bounds[i + 1]; ++j) {
      share.above += inside[j] > result.key;
      share.equal += inside[j] == result.key;
    }
  }
  int64_t ties = count;
  for (const Share& share : result.shares) ties -= share.above;
  deal(result.shares, ties);
  return result;
}

uint32_t key_of_rank(const uint32_t* keys, int64_t count, int64_t rank) {
  Histogram histogram;
  histogram.clear(0);
  histogram.count(keys, count);
  const Histogram::Place place = histogram.find(rank);
  std::vector<uint32_t> inside;
  for (int64_t i = 0; i < count; ++i) {
    if (keys[i] && histogram.bin(keys[i]) == place.bin) inside.push_back(keys[i]);
  }
  return place.rank <= static_cast<int64_t>(inside.size()) ? nth_largest(inside, place.rank) : 0;
}

void emit(const Loops& loop, const Part& part, uint32_t threshold, Share share, int32_t* to) {
  if (share.ties == 0) return loop.compress(part.keys, part.positions, threshold + 1, share.above, to);
  if (share.ties == share.equal) {
    return loop.compress(part.keys, part.positions, threshold, share.above + share.equal, to);
  }
  for (int64_t i = 0; i < part.count; ++i) {
    if (part.keys[i] > threshold || (part.keys[i] == threshold && share.ties-- > 0)) *to++ = part.positions[i];
  }
}

}  // namespace ringprune
