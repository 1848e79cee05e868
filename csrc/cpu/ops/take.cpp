// take on the CPU: the values to be sent leave the residual.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../../checks.h"
#include "../../tensors.h"
#include "../scattered.h"

namespace ringprune {
namespace {

constexpr const char* kTake = "take";

at::Tensor take(const at::Tensor& residual, const std::optional<at::Tensor>& velocity, const at::Tensor& indices,
                at::IntArrayRef offsets) {
  const int64_t numel = residual.numel();
  check_flat({kTake, "residual"}, residual, at::kFloat, numel);
  if (velocity) check_flat({kTake, "velocity"}, *velocity, at::kFloat, numel);
  check_offsets(kTake, offsets, numel);
  check_indices(kTake, indices, numel);
  check_take_apart(kTake, residual, velocity, indices);

  const int64_t count = indices.numel();
  const int32_t* index = indices.const_data_ptr<int32_t>();
  std::vector<int64_t> bounds;  // where the indices of each tensor start
  bounds.reserve(offsets.size());
  for (const int64_t offset : offsets) bounds.push_back(std::lower_bound(index, index + count, offset) - index);

  at::Tensor values = at::empty({count}, residual.options());
  float* to = values.mutable_data_ptr<float>();
  float* from = residual.mutable_data_ptr<float>();
  float* masked = velocity ? velocity->mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, count, kFewest, [&](int64_t begin, int64_t end) {
    for_each_run(bounds, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const bool whole = bounds[tensor + 1] - bounds[tensor] == offsets[tensor + 1] - offsets[tensor];
      for (int64_t i = lo; i < hi; ++i) {
        const int32_t soon = index[std::min(i + kAhead, hi - 1)];
        __builtin_prefetch(from + soon, 1);
        if (masked) __builtin_prefetch(masked + soon, 1);
        to[i] = from[index[i]];
        from[index[i]] = 0.0f;
        if (masked && !whole) masked[index[i]] = 0.0f;
      }
    });
  });
  mark_written(residual);
  if (velocity) mark_written(*velocity);
  return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("take", take); }

}  // namespace ringprune
