// select on the CPU: the exact largest scores of every tensor, by radix select, ties to the lowest position.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "../arithmetic.h"
#include "../checks.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "select";

// The smallest key selected, and how many of the entries that have exactly this key.
struct Threshold {
  uint32_t key;
  int64_t ties;
};

// Finds the threshold of the `count` largest keys digit by digit, from the top: each pass counts the next digit of
// the entries that agree with the digits found so far. Needs 1 <= count <= entries.
Threshold find_threshold(const float* scores, int64_t entries, int64_t count) {
  constexpr int kDigits = 2048;
  constexpr std::array<int, 3> kShifts{21, 10, 0};  // 11, 11 and 10 bits
  std::array<int64_t, kDigits> histogram;
  uint32_t found = 0;  // the digits of the threshold so far
  uint32_t known = 0;  // which bits those are
  for (const int shift : kShifts) {
    histogram.fill(0);
    for (int64_t i = 0; i < entries; ++i) {
      const uint32_t key = ordered_key(scores[i]);
      if ((key & known) == found) ++histogram[(key & ~known) >> shift];
    }
    uint32_t digit = kDigits - 1;
    while (digit > 0 && count > histogram[digit]) count -= histogram[digit--];
    found |= digit << shift;
    known = ~((uint32_t{1} << shift) - 1);
  }
  return {found, count};
}

// Writes the positions of the `count` largest scores, ascending, counted from `start`.
void select_one(const float* scores, int64_t entries, int64_t count, int64_t start, int64_t* positions) {
  if (count == 0) return;
  Threshold threshold = find_threshold(scores, entries, count);
  for (int64_t i = 0; i < entries; ++i) {
    const uint32_t key = ordered_key(scores[i]);
    if (key > threshold.key || (key == threshold.key && threshold.ties-- > 0)) *positions++ = start + i;
  }
}

at::Tensor select(const at::Tensor& scores, at::IntArrayRef offsets, at::IntArrayRef counts) {
  check_flat({kOp, "scores"}, scores, at::kFloat, scores.numel());
  check_offsets(kOp, offsets, scores.numel());
  const auto tensors = static_cast<int64_t>(offsets.size()) - 1;
  check_length({kOp, "counts"}, counts.size(), tensors);
  std::vector<int64_t> starts{0};  // where the positions of each tensor go
  for (int64_t i = 0; i < tensors; ++i) {
    const int64_t entries = offsets[i + 1] - offsets[i];
    TORCH_CHECK_VALUE(0 <= counts[i] && counts[i] <= entries, Name{kOp, "counts", i}.str(), " = ", counts[i], "; 0 to ",
                      entries, " is allowed, the entries of tensor ", i);
    starts.push_back(starts.back() + counts[i]);
  }

  at::Tensor positions = at::empty({starts.back()}, scores.options().dtype(at::kLong));
  const float* from = scores.const_data_ptr<float>();
  int64_t* to = positions.mutable_data_ptr<int64_t>();
  at::parallel_for(0, tensors, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      select_one(from + offsets[i], offsets[i + 1] - offsets[i], counts[i], offsets[i], to + starts[i]);
    }
  });
  return positions;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("select", select); }

}  // namespace ringprune
