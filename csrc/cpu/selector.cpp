// How hints are kept, found and mended, and how the work is divided; the thresholds are found in threshold.cpp.

#include "selector.h"

#include <atomic>
#include <cmath>
#include <numeric>

#include "../arithmetic.h"
#include "../tensors.h"

namespace ringprune {
namespace {

// Margins in 1024ths of the count: a hint is the key of rank margin * count, so that the next step finds enough.
constexpr int64_t kUnit = 1024;
constexpr int64_t kFirstMargin = 1434;   // 1.4
constexpr int64_t kSteadyMargin = 1280;  // 1.25, where scores hardly change; below 1 where all of them grow
constexpr int64_t kLeastMargin = 1;
constexpr int64_t kMostMargin = 2560;  // 2.5
constexpr int32_t kPad = -1;
// Candidates there is room for; beyond, a hint is no help.
int64_t room_for(int64_t count) { return 3 * count + 4096; }

int64_t margin_of(Hint hint) {
  return hint.margin > 0 ? std::clamp<int64_t>(hint.margin, kLeastMargin, kMostMargin) : kFirstMargin;
}

// The margin that would have served at a step at which a hint aimed at `rank` let `candidates` through.
int64_t needed_margin(int64_t rank, int64_t candidates) {
  return std::clamp(kSteadyMargin * rank / std::max<int64_t>(candidates, 1), kLeastMargin, kMostMargin);
}

// The margin after a step that went well: it rises at once and falls slowly, for a miss costs more than candidates do.
int64_t next_margin(int64_t margin, int64_t rank, int64_t candidates) {
  const int64_t needed = needed_margin(rank, candidates);
  return std::max(needed, margin - std::max<int64_t>(0, margin - needed) / 32);
}

// The rank a hint is aimed at; the root allows for chance, which is large where ranks are small.
int64_t rank_of(int64_t count, int64_t margin) {
  const double aim = static_cast<double>(count) * static_cast<double>(margin) / kUnit;
  return static_cast<int64_t>(std::ceil(aim + 3 * std::sqrt(aim) + 5));
}

std::vector<int64_t> range_of(size_t count) {
  std::vector<int64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// What some of a tensor's entries tell: a key that somewhat more than the wanted number of all its entries reach (1
// where there are few), and how many of them seem to reach another key.
struct Sample {
  uint32_t hint;
  int64_t reach;
};

Sample sample(const KeySource& source, int64_t tensor, int64_t lo, int64_t hi, int64_t count, uint32_t other) {
  constexpr int64_t kStretch = 32;  // entries read together
  constexpr double kWanted = 100;   // entries of the sample that are among the largest `count`
  constexpr int64_t kLeast = 4096;  // below, everything is a candidate
  constexpr int64_t kMost = 131072;
  const int64_t entries = hi - lo;
  const double share = static_cast<double>(count) / static_cast<double>(entries);
  const auto wanted = std::clamp(static_cast<int64_t>(kWanted / share), kLeast, kMost);
  if (wanted >= entries || rank_of(count, kFirstMargin) >= entries) return {1, entries};

  const int64_t stretches = wanted / kStretch;
  const int64_t sampled = stretches * kStretch;
  Scratch scratch(sizeof(uint32_t) * sampled);
  auto* keys = scratch.take<uint32_t>(sampled);
  uint32_t random = 12345;  // the same every time: a hint changes how fast, never what
  for (int64_t i = 0; i < stretches; ++i) {
    random = random * 1664525u + 1013904223u;
    const int64_t begin = entries * i / stretches;
    const int64_t slack = std::max<int64_t>(1, entries * (i + 1) / stretches - begin - kStretch);
    source.read(tensor, lo + begin + (random >> 8) % slack, kStretch, keys + i * kStretch);
  }
  const double among = share * static_cast<double>(sampled);
  const auto rank = static_cast<int64_t>(among + 4 * std::sqrt(among) + 2);
  const int64_t reach = std::count_if(keys, keys + sampled, [&](uint32_t key) { return key >= other; });
  return {std::max<uint32_t>(1, key_of_rank(keys, sampled, rank)), reach * entries / sampled};
}

}  // namespace

Division::Division(c10::IntArrayRef offsets, c10::IntArrayRef tensors, c10::IntArrayRef counts) {
  std::vector<int64_t> begins{0};  // of the tensors, laid one after another
  for (const int64_t tensor : tensors) begins.push_back(begins.back() + offsets[tensor + 1] - offsets[tensor]);
  const int64_t entries = begins.back();
  const int64_t tasks = std::clamp<int64_t>(entries / kGrain, 1, at::get_num_threads());
  size_t bytes = 0;
  for (int64_t task = 0; task < tasks; ++task) {
    for_each_run(begins, entries * task / tasks, entries * (task + 1) / tasks, [&](int64_t i, int64_t lo, int64_t hi) {
      const int64_t tensor = tensors[i];
      const int64_t shift = offsets[tensor] - begins[i];
      const int64_t room = counts[tensor] ? std::min(hi - lo, room_for(counts[tensor])) : 0;
      parts_.push_back({tensor, lo + shift, hi + shift, room});
      bytes += 2 * (sizeof(uint32_t) * (room + Part::kSlack) + 64) + sizeof(Histogram) + 64;
    });
    first_.push_back(static_cast<int64_t>(parts_.size()));
  }
  scratch_ = std::make_unique<Scratch>(bytes);
  for (Part& part : parts_) {
    part.keys = scratch_->take<uint32_t>(part.room + Part::kSlack);
    part.positions = scratch_->take<int32_t>(part.room + Part::kSlack);
    if (part.room > Part::kFew) part.histogram = scratch_->take<Histogram>(1);
  }
}

c10::ArrayRef<Part> Division::of(int64_t tensor) const {
  const auto [first, last] = std::equal_range(parts_.begin(), parts_.end(), Part{tensor, 0, 0, 0},
                                              [](const Part& a, const Part& b) { return a.tensor < b.tensor; });
  return {parts_.data() + (first - parts_.begin()), static_cast<size_t>(last - first)};
}

Selector::Selector(c10::IntArrayRef offsets, c10::IntArrayRef counts, c10::IntArrayRef starts,
                   c10::ArrayRef<Hint> hints)
    : offsets_(offsets),
      counts_(counts),
      starts_(starts),
      hints_(hints.vec()),
      keys_(counts.size()),
      found_(counts.size()),
      division_of_(counts.size(), &division_),
      division_(offsets, range_of(counts.size()), counts) {
  for (size_t i = 0; i < keys_.size(); ++i) {
    keys_[i] = counts[i] ? static_cast<uint32_t>(std::max(hints[i].key, 0)) : Part::kNothing;
  }
}

void Selector::warm(const KeySource& ahead) {
  std::vector<int64_t> cold;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == 0) cold.push_back(static_cast<int64_t>(i));
  }
  tally_.cold += static_cast<int64_t>(cold.size());
  at::parallel_for(0, static_cast<int64_t>(cold.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tensor = cold[i];
      keys_[tensor] = sample(ahead, tensor, offsets_[tensor], offsets_[tensor + 1], counts_[tensor], 0).hint;
    }
  });
}

Selector::Fit Selector::fit(const Division& division, int64_t tensor) const {
  int64_t candidates = 0;
  for (const Part& part : division.of(tensor)) {
    if (part.overflowed) return Fit::kOverflowed;
    candidates += part.count;
  }
  return candidates < counts_[tensor] && keys_[tensor] > 1 ? Fit::kMissed : Fit::kGood;
}

void Selector::collect_again(const KeySource& source) {
  std::vector<int64_t> again;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (counts_[i] == 0) continue;
    ++tally_.tensors;
    const Fit found = fit(division_, static_cast<int64_t>(i));
    if (found == Fit::kGood) continue;
    again.push_back(static_cast<int64_t>(i));
    ++(found == Fit::kMissed ? tally_.missed : tally_.overflowed);
  }
  if (again.empty()) return;
  at::parallel_for(0, static_cast<int64_t>(again.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tensor = again[i];
      const Sample seen =
          sample(source, tensor, offsets_[tensor], offsets_[tensor + 1], counts_[tensor], keys_[tensor]);
      keys_[tensor] = seen.hint;
      Hint& hint = hints_[tensor];
      const int64_t rank = rank_of(counts_[tensor], margin_of(hint));
      const int64_t needed = needed_margin(rank, seen.reach);
      // After an overflow half of the way, on a scale of ratios: what one step grew by is a poor forecast.
      const auto halfway = static_cast<int64_t>(std::sqrt(static_cast<double>(needed * margin_of(hint))));
      hint.margin = static_cast<int32_t>(std::max(needed, halfway));
    }
  });
  second_ = std::make_unique<Division>(offsets_, again, counts_);
  second_->collect(keys_, [&](Part& part) {
    alignas(64) std::array<uint32_t, kBlock> keys;
    for_each_block(part.lo, part.hi, [&](int64_t lo, int64_t count) {
      source.read(part.tensor, lo, count, keys.data());
      part.add(loops(), keys.data(), count, lo);
    });
  });
  for (const int64_t tensor : again) division_of_[tensor] = second_.get();
}

// Where no hint serves - far more equal keys than are wanted, or a sample that misleads - the threshold is found digit
// by digit, reading all keys for each. Rare, and slow for large tensors.
void Selector::exhaust(const KeySource& source, int64_t tensor, int32_t* positions) {
  const int64_t lo = offsets_[tensor];
  const int64_t hi = offsets_[tensor + 1];
  uint32_t threshold = 0;  // its digits so far
  int64_t rank = counts_[tensor];
  struct Digit {
    int shift;
    int bits;
  };
  for (const auto [shift, bits] : {Digit{20, 11}, Digit{9, 11}, Digit{0, 9}}) {
    const uint32_t mask = (1u << bits) - 1;
    const int above = shift + bits;
    std::array<std::atomic<int64_t>, 2048> bins{};
    at::parallel_for(lo, hi, kGrain, [&, shift = shift](int64_t begin, int64_t end) {
      std::array<uint32_t, kBlock> keys;
      std::array<int64_t, 2048> own{};
      for_each_block(begin, end, [&](int64_t at, int64_t count) {
        source.read(tensor, at, count, keys.data());
        for (int64_t i = 0; i < count; ++i) {
          own[(keys[i] >> shift) & mask] += keys[i] >> above == threshold >> above;
        }
      });
      for (size_t i = 0; i < own.size(); ++i) bins[i] += own[i];
    });
    uint32_t digit = mask;
    while (digit > 0 && rank > bins[digit]) rank -= bins[digit--];
    threshold |= digit << shift;
  }
  int64_t ties = threshold ? rank : 0;  // an entry without importance is not selected
  int32_t* to = positions + starts_[tensor];
  int32_t* const end = to + counts_[tensor];
  std::array<uint32_t, kBlock> keys;
  for_each_block(lo, hi, [&](int64_t at, int64_t count) {
    if (to == end) return;
    source.read(tensor, at, count, keys.data());
    for (int64_t i = 0; i < count; ++i) {
      if (keys[i] > threshold || (keys[i] == threshold && ties-- > 0)) *to++ = static_cast<int32_t>(at + i);
    }
  });
  std::fill(to, end, kPad);
  hints_[tensor].key = static_cast<int32_t>(std::max<uint32_t>(1, threshold));
  division_of_[tensor] = nullptr;
}

// Finds threshold and next hint of a tensor whose candidates fit.
void Selector::resolve(int64_t tensor) {
  const c10::ArrayRef<Part> parts = division_of_[tensor]->of(tensor);
  const int64_t entries = offsets_[tensor + 1] - offsets_[tensor];
  Hint& hint = hints_[tensor];
  int64_t margin = margin_of(hint);
  if (division_of_[tensor] == &division_ && hint.key > 1) {
    int64_t candidates = 0;
    for (const Part& part : parts) candidates += part.count;
    margin = next_margin(margin, rank_of(counts_[tensor], margin), candidates);
  }
  const int64_t rank = rank_of(counts_[tensor], margin);
  found_[tensor] = find_threshold(loops(), parts, counts_[tensor], rank);
  hint = {static_cast<int32_t>(rank < entries ? found_[tensor].next_hint : 1), static_cast<int32_t>(margin)};
}

// Writes what is selected of one part behind what is selected of the tensor's parts before it.
void Selector::write(const Division& division, const Part& part, int32_t* positions) const {
  const int64_t tensor = part.tensor;
  if (counts_[tensor] == 0 || division_of_[tensor] != &division) return;
  const c10::ArrayRef<Part> parts = division.of(tensor);
  const std::vector<Share>& shares = found_[tensor].shares;
  const auto place = static_cast<size_t>(&part - parts.data());
  int32_t* to = positions + starts_[tensor];
  for (size_t i = 0; i < place; ++i) to += shares[i].selected();
  emit(loops(), part, found_[tensor].key, shares[place], to);
  if (place + 1 == parts.size()) std::fill(to + shares[place].selected(), positions + starts_[tensor + 1], kPad);
}

void Selector::finish(const KeySource& source, int32_t* positions) {
  collect_again(source);
  std::vector<int64_t> order;  // of the tensors whose candidates fit
  int64_t candidates = 0;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (counts_[i] == 0) continue;
    const auto tensor = static_cast<int64_t>(i);
    if (division_of_[i] == second_.get() && fit(*second_, tensor) != Fit::kGood) {
      exhaust(source, tensor, positions);
    } else {
      order.push_back(tensor);
      candidates += counts_[i];
    }
  }
  // Few candidates are done before other threads would have started.
  const int64_t threads = candidates < kGrain ? 1 : at::get_num_threads();
  const auto share = [&](int64_t i) { return static_cast<int64_t>(order.size()) * i / threads; };
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = share(begin); i < share(end); ++i) resolve(order[i]);
  });
  for (Division* division : {&division_, second_.get()}) {
    if (division == nullptr) continue;
    division->for_each_part([&](const Part& part) { write(*division, part, positions); }, threads > 1);
  }
}

}  // namespace ringprune
