// How hints are kept, found and mended, and how the work is divided; the thresholds are found in threshold.cpp.

#include "selector.h"

#include <atomic>
#include <bit>
#include <iterator>
#include <numeric>

#include "../arithmetic.h"
#include "../margin.h"
#include "../tensors.h"

namespace ringprune {
namespace {

std::vector<int64_t> range_of(size_t count) {
  std::vector<int64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
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
      bytes += 2 * Scratch::bytes_for<uint32_t>(room + Part::kSlack) + Scratch::bytes_for<Histogram>(1);
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
      guesses_(counts.size()),
      found_(counts.size()),
      division_of_(counts.size(), &division_),
      division_(offsets, range_of(counts.size()), counts) {
  for (size_t i = 0; i < keys_.size(); ++i) {
    keys_[i] = counts[i] ? static_cast<uint32_t>(std::max(hints[i].key, 0)) : Part::kNothing;
  }
}

void Selector::warm(KeySource ahead) {
  std::vector<int64_t> cold;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == 0) cold.push_back(static_cast<int64_t>(i));
  }
  tally_.cold += static_cast<int64_t>(cold.size());
  at::parallel_for(0, static_cast<int64_t>(cold.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tensor = cold[i];
      keys_[tensor] = sample(ahead, tensor, offsets_[tensor], offsets_[tensor + 1], counts_[tensor]).hint;
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

// Finds a hint that fits, and a margin for the next.
void Selector::mend(KeySource source, int64_t tensor) {
  const Sample seen = sample(source, tensor, offsets_[tensor], offsets_[tensor + 1], counts_[tensor], keys_[tensor]);
  Hint& hint = hints_[tensor];
  const int64_t margin = margin_of(hint.margin);
  int64_t needed = needed_margin(rank_of(counts_[tensor], margin), seen.reach_other);
  if (fit(division_, tensor) == Fit::kMissed) needed = std::max(needed, margin);  // whatever chance says
  hint.margin = static_cast<int32_t>(mended_margin(margin, needed));
  // Equal keys may be so many that no hint fits: then there is no use in collecting again.
  keys_[tensor] = seen.reach > 2 * room_for(counts_[tensor]) ? Part::kNothing : seen.hint;
  guesses_[tensor] = seen.hint;
}

void Selector::collect_again(KeySource source) {
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
    for (int64_t i = begin; i < end; ++i) mend(source, again[i]);
  });
  std::vector<int64_t> hopeful;
  std::copy_if(again.begin(), again.end(), std::back_inserter(hopeful),
               [&](int64_t tensor) { return keys_[tensor] != Part::kNothing; });
  second_ = std::make_unique<Division>(offsets_, hopeful, counts_);
  second_->collect(keys_, reading(source));
  for (const int64_t tensor : again) division_of_[tensor] = second_.get();
}

// Counts the keys of a tensor that are equal to `key`, and those above it.
Selector::Reach Selector::reach(KeySource source, int64_t tensor, uint32_t key) const {
  std::atomic<int64_t> equal{0};
  std::atomic<int64_t> above{0};
  at::parallel_for(offsets_[tensor], offsets_[tensor + 1], kGrain, [&](int64_t begin, int64_t end) {
    alignas(64) std::array<uint32_t, kBlock> keys;
    Reach own;
    for_each_block(begin, end, [&](int64_t at, int64_t count) {
      std::fill(keys.begin() + count, keys.end(), 0);
      source(tensor, at, count, keys.data());
      for (int64_t i = 0; i < count; i += kWord) {
        const uint64_t over = loops().at_least(keys.data() + i, key + 1);
        own.above += std::popcount(over);
        own.equal += std::popcount(loops().at_least(keys.data() + i, key) & ~over);
      }
    });
    equal += own.equal;
    above += own.above;
  });
  return {equal, above};
}

// The threshold of a tensor by reading all of its keys: first whether the guess is it, as where far more keys are equal
// than are wanted, then digit by digit. `rank` comes back as the number of ties to take.
uint32_t Selector::read_threshold(KeySource source, int64_t tensor, int64_t& rank) const {
  const uint32_t guess = guesses_[tensor];
  const Reach seen = reach(source, tensor, guess);
  if (seen.above < rank && rank <= seen.above + seen.equal) {
    rank -= seen.above;
    return guess;
  }
  const auto count = [&](auto& bins, const auto& bin_of) {
    at::parallel_for(offsets_[tensor], offsets_[tensor + 1], kGrain, [&](int64_t begin, int64_t end) {
      std::array<uint32_t, kBlock> keys;
      std::array<int64_t, 2049> own{};  // the last for keys that do not count
      for_each_block(begin, end, [&](int64_t at, int64_t number) {
        source(tensor, at, number, keys.data());
        for (int64_t i = 0; i < number; ++i) ++own[bin_of(keys[i])];
      });
      for (size_t i = 0; i < bins.size(); ++i) bins[i] += own[i];
    });
  };
  uint32_t threshold = 0;  // its digits so far
  for (const auto& [shift, bits] : {std::pair{20, 11}, std::pair{9, 11}, std::pair{0, 9}}) {
    const int low = shift;
    const int high = shift + bits;
    const uint32_t mask = (1u << bits) - 1;
    std::array<std::atomic<int64_t>, 2048> bins{};
    count(bins, [=](uint32_t key) { return key >> high == threshold >> high ? (key >> low) & mask : 2048; });
    uint32_t digit = mask;
    while (digit > 0 && rank > bins[digit]) rank -= bins[digit--];
    threshold |= digit << low;
  }
  return threshold;
}

// Selects from a tensor for which no hint fits - far more equal keys than are wanted, or a sample that misleads.
void Selector::exhaust(KeySource source, int64_t tensor, int32_t* positions) {
  int64_t ties = counts_[tensor];
  const uint32_t threshold = read_threshold(source, tensor, ties);
  if (threshold == 0) ties = 0;  // an entry without importance is not selected
  int32_t* to = positions + starts_[tensor];
  int32_t* const end = to + counts_[tensor];
  std::array<uint32_t, kBlock> keys;
  for_each_block(offsets_[tensor], offsets_[tensor + 1], [&](int64_t at, int64_t count) {
    if (to == end) return;
    source(tensor, at, count, keys.data());
    for (int64_t i = 0; i < count; ++i) {
      if (keys[i] > threshold || (keys[i] == threshold && ties-- > 0)) *to++ = static_cast<int32_t>(at + i);
    }
  });
  std::fill(to, end, kPad);
  constexpr uint32_t kLower = 1u << 18;  // some hundredths: a hint that is the threshold misses every other time
  hints_[tensor].key = static_cast<int32_t>(threshold > kLower ? threshold - kLower : 1);
  division_of_[tensor] = nullptr;
}

// Finds threshold and next hint of a tensor whose candidates fit.
void Selector::resolve(int64_t tensor) {
  const c10::ArrayRef<Part> parts = division_of_[tensor]->of(tensor);
  const int64_t entries = offsets_[tensor + 1] - offsets_[tensor];
  Hint& hint = hints_[tensor];
  int64_t margin = margin_of(hint.margin);
  if (division_of_[tensor] == &division_ && hint.key > 1) {
    int64_t candidates = 0;
    for (const Part& part : parts) candidates += part.count;
    margin = next_margin(margin, needed_margin(rank_of(counts_[tensor], margin), candidates));
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

void Selector::finish(KeySource source, int32_t* positions) {
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
