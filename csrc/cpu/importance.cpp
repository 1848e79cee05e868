// importance on the CPU: one score per entry of the residual, from the entry, its weight and its tensor's floor.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../arithmetic.h"
#include "../checks.h"
#include "../tensors.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "importance";

// The pass for any score: `score(residual, weight, floor)` sees one entry.
template <class Score>
at::Tensor score_entries(const at::Tensor& residual, at::TensorList weights, at::ArrayRef<double> floors, Score score) {
  const std::vector<int64_t> offsets = offsets_of(kOp, "weights", weights);
  const int64_t numel = offsets.back();
  check_dtypes(kOp, "weights", weights);
  check_flat({kOp, "residual"}, residual, at::kFloat, numel);
  check_length({kOp, "floors"}, floors.size(), weights.size());

  at::Tensor scores = at::empty_like(residual);
  const float* from = residual.const_data_ptr<float>();
  float* to = scores.mutable_data_ptr<float>();
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const auto floor = static_cast<float>(floors[tensor]);
      with_dtype({kOp, "weights", tensor}, weights[tensor], [&](auto zero) {
        using scalar_t = decltype(zero);
        const scalar_t* weight = weights[tensor].const_data_ptr<scalar_t>() + (lo - offsets[tensor]);
        for (int64_t i = lo; i < hi; ++i) to[i] = score(from[i], static_cast<float>(weight[i - lo]), floor);
      });
    });
  });
  return scores;
}

at::Tensor importance(const at::Tensor& residual, at::TensorList weights, at::ArrayRef<double> floors) {
  return score_entries(residual, weights, floors, RelativeImportance{});
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("importance", importance); }

}  // namespace ringprune
