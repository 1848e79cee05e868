// give_back on the CPU: what rounding dropped goes back into the residual.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../../checks.h"
#include "../scattered.h"

namespace ringprune {
namespace {

constexpr const char* kGiveBack = "give_back";

void give_back(const at::Tensor& residual, const at::Tensor& indices, const at::Tensor& values) {
  const int64_t numel = residual.numel();
  check_flat({kGiveBack, "residual"}, residual, at::kFloat, numel);
  check_flat({kGiveBack, "values"}, values, at::kFloat, indices.numel());
  check_indices(kGiveBack, indices, numel);
  check_give_back_apart(kGiveBack, residual, indices, values);

  const int32_t* index = indices.const_data_ptr<int32_t>();
  const float* from = values.const_data_ptr<float>();
  float* to = residual.mutable_data_ptr<float>();
  at::parallel_for(0, indices.numel(), kFewest, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      __builtin_prefetch(to + index[std::min(i + kAhead, end - 1)], 1);
      to[index[i]] = from[i];
    }
  });
  mark_written(residual);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("give_back", give_back); }

}  // namespace ringprune
