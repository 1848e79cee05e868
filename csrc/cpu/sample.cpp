// The sample: stretches of neighbours, evenly spread, each shifted by chance.

#include "sample.h"

#include <algorithm>
#include <cmath>

#include "../margin.h"
#include "scratch.h"
#include "threshold.h"

namespace ringprune {
namespace {

constexpr int64_t kStretch = 32;   // entries read together
constexpr int64_t kMost = 131072;  // entries of the sample

struct Size {
  double wanted;    // entries of the sample that are among the largest `count`
  int64_t least;    // entries of the sample
  uint32_t random;  // the same every time: a hint changes how fast, never what
};
constexpr Size kFirst{40, 2048, 12345};  // small tensors are slowed by more than better hints save
constexpr Size kAfter{64, 4096, 54321};  // where one did not fit: another sample, or it would mislead again

void read_all(KeySource source, int64_t tensor, int64_t lo, int64_t hi, uint32_t* keys) {
  for_each_block(lo, hi, [&](int64_t at, int64_t count) { source(tensor, at, count, keys + (at - lo)); });
}

void read_some(KeySource source, int64_t tensor, int64_t lo, int64_t hi, int64_t stretches, uint32_t random,
               uint32_t* keys) {
  const int64_t entries = hi - lo;
  for (int64_t i = 0; i < stretches; ++i) {
    random = random * 1664525u + 1013904223u;
    const int64_t begin = entries * i / stretches;
    const int64_t slack = std::max<int64_t>(1, entries * (i + 1) / stretches - begin - kStretch);
    source(tensor, lo + begin + (random >> 8) % slack, kStretch, keys + i * kStretch);
  }
}

}  // namespace

Sample sample(KeySource source, int64_t tensor, int64_t lo, int64_t hi, int64_t count, std::optional<uint32_t> other) {
  const Size& size = other ? kAfter : kFirst;
  const int64_t entries = hi - lo;
  const double share = static_cast<double>(count) / static_cast<double>(entries);
  const int64_t wanted = std::clamp(static_cast<int64_t>(size.wanted / share), size.least, kMost);
  const bool all = wanted >= entries;
  const int64_t sampled = all ? entries : wanted / kStretch * kStretch;
  Scratch scratch(Scratch::bytes_for<uint32_t>(sampled));
  auto* keys = scratch.take<uint32_t>(sampled);
  if (all) {
    read_all(source, tensor, lo, hi, keys);
  } else {
    read_some(source, tensor, lo, hi, sampled / kStretch, size.random, keys);
  }
  const auto reach = [&](uint32_t key) {
    return std::count_if(keys, keys + sampled, [&](uint32_t one) { return one >= key; }) * entries / sampled;
  };
  const double among = share * static_cast<double>(sampled);
  // Four standard deviations of what chance does to a sample; without chance a margin is enough.
  const int64_t rank = all ? rank_of(count, kSteadyMargin) : static_cast<int64_t>(among + 4 * std::sqrt(among) + 2);
  const bool few = entries <= room_for(count);
  const uint32_t hint = few ? 1 : std::max<uint32_t>(1, key_of_rank(keys, sampled, std::min(rank, sampled)));
  return other ? Sample{hint, reach(hint), reach(*other)} : Sample{hint};
}

}  // namespace ringprune
