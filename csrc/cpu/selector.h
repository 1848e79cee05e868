// Exact selection of the largest keys of every tensor of a bucket, ties to the lowest position.
//
// A kernel passes once over the bucket and hands each block of keys to the Part it belongs to, which collects those at
// or above the tensor's hint. finish() then finds the exact threshold among these candidates and writes the positions.
// A tensor whose hint was missing, too high or much too low is read once more with a hint from a sample.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <vector>

#include "candidates.h"
#include "sample.h"
#include "scratch.h"
#include "threshold.h"

namespace ringprune {

// What is kept of a tensor between steps: see Hints in ringprune/ops/accumulate_select.py.
struct Hint {
  int32_t key = 0;
  int32_t margin = 0;
};
static_assert(sizeof(Hint) == 2 * sizeof(int32_t));

struct Tally {
  int64_t tensors = 0;
  int64_t cold = 0;
  int64_t missed = 0;
  int64_t overflowed = 0;

  std::array<int64_t, 4> in_order() const { return {tensors, cold, missed, overflowed}; }
};

// A pass that does nothing but read keys and collect.
inline auto reading(KeySource source) {
  return [source](Part& part) {
    alignas(64) std::array<uint32_t, kBlock> keys;
    for_each_block(part.lo, part.hi, [&](int64_t lo, int64_t count) {
      source(part.tensor, lo, count, keys.data());
      part.add(loops(), keys.data(), count, lo);
    });
  };
}

// Some of a bucket's tensors, divided among the threads: each has a list of parts, in the order of their positions.
class Division {
 public:
  // Args: where the bucket's tensors start, which of them to divide, and how many are selected of each.
  Division(c10::IntArrayRef offsets, c10::IntArrayRef tensors, c10::IntArrayRef counts);

  // Calls visit(part) for every part, on all threads or on this one.
  template <class Visit>
  void for_each_part(const Visit& visit, bool parallel = true) {
    const auto tasks = static_cast<int64_t>(first_.size()) - 1;
    at::parallel_for(0, tasks, parallel ? 1 : tasks, [&](int64_t begin, int64_t end) {
      for (int64_t i = first_[begin]; i < first_[end]; ++i) visit(parts_[i]);
    });
  }

  // Collects candidates: pass(part) calls part.add() for all blocks of the part.
  template <class Pass>
  void collect(const std::vector<uint32_t>& hints, const Pass& pass) {
    for_each_part([&](Part& part) {
      part.hint = hints[part.tensor];
      pass(part);
      part.close();
    });
  }

  // The parts of one of the divided tensors.
  c10::ArrayRef<Part> of(int64_t tensor) const;

 private:
  std::vector<Part> parts_;
  std::vector<int64_t> first_{0};  // where each thread's parts start
  std::unique_ptr<Scratch> scratch_;
};

class Selector {
 public:
  // Args: where each tensor starts, how many to select of each, where their positions go, and what is kept of each
  // tensor between steps, which finish() replaces.
  Selector(c10::IntArrayRef offsets, c10::IntArrayRef counts, c10::IntArrayRef starts, c10::ArrayRef<Hint> hints);

  // Looks for hints where there are none, by sampling; `ahead` tells the keys that the pass is going to find.
  void warm(KeySource ahead);

  template <class Pass>
  void collect(const Pass& pass) {
    division_.collect(keys_, pass);
  }

  // Writes the positions, and pads where a tensor has too few keys above 0; `source` tells the keys once more.
  void finish(KeySource source, int32_t* positions);

  const std::vector<Hint>& hints() const { return hints_; }
  const Tally& tally() const { return tally_; }

 private:
  enum class Fit { kGood, kMissed, kOverflowed };
  Fit fit(const Division& division, int64_t tensor) const;
  void mend(KeySource source, int64_t tensor);
  void collect_again(KeySource source);
  struct Reach {
    int64_t equal = 0;
    int64_t above = 0;
  };
  Reach reach(KeySource source, int64_t tensor, uint32_t key) const;
  uint32_t read_threshold(KeySource source, int64_t tensor, int64_t& rank) const;
  void exhaust(KeySource source, int64_t tensor, int32_t* positions);
  void resolve(int64_t tensor);
  void write(const Division& division, const Part& part, int32_t* positions) const;

  c10::IntArrayRef offsets_;
  c10::IntArrayRef counts_;
  c10::IntArrayRef starts_;
  std::vector<Hint> hints_;
  std::vector<uint32_t> keys_;     // the hints in use
  std::vector<uint32_t> guesses_;  // keys that may be thresholds, of tensors whose hint did not fit
  std::vector<Threshold> found_;
  std::vector<const Division*> division_of_;  // where the candidates of each tensor are; null: it is written already
  Division division_;
  std::unique_ptr<Division> second_;  // of the tensors whose hint did not fit
  Tally tally_;
};

}  // namespace ringprune
