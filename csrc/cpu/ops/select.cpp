// select on the CPU: the exact largest scores of every tensor.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../checks.h"
#include "../selector.h"

namespace ringprune {
namespace {

constexpr const char* kSelect = "select";

at::Tensor select(const at::Tensor& scores, at::IntArrayRef offsets, at::IntArrayRef counts) {
  check_flat({kSelect, "scores"}, scores, at::kFloat, scores.numel());
  check_positions(kSelect, scores.numel());
  check_offsets(kSelect, offsets, scores.numel());
  const std::vector<int64_t> starts = check_counts(kSelect, counts, offsets);

  at::Tensor positions = at::empty({starts.back()}, at::kInt);
  const float* from = scores.const_data_ptr<float>();
  const auto keys = [&](int64_t, int64_t lo, int64_t count, uint32_t* to) { loops().keys_of(from + lo, count, to); };
  const std::vector<Hint> cold(counts.size());
  Selector selector(offsets, counts, starts, cold);
  selector.warm(keys);
  selector.collect(reading(keys));
  selector.finish(keys, positions.mutable_data_ptr<int32_t>());
  return positions;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("select", select); }

}  // namespace ringprune
