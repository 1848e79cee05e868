// count_nonfinite on the CPU: how many entries of each tensor are NaN or infinite.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "../checks.h"
#include "../tensors.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "count_nonfinite";

template <class scalar_t>
int64_t count_one(const scalar_t* x, int64_t count) {
  using wide_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
  std::atomic<int64_t> total{0};
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) found += !std::isfinite(static_cast<wide_t>(x[i]));
    total += found;
  });
  return total;
}

at::Tensor count_nonfinite(at::TensorList tensors) {
  offsets_of(kOp, "tensors", tensors);  // for its checks
  at::Tensor counts = at::empty({static_cast<int64_t>(tensors.size())}, at::TensorOptions().dtype(at::kLong));
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Name name{kOp, "tensors", static_cast<int64_t>(i)};
    count[i] = with_dtype_or_double(name, tensors[i], [&](auto zero) {
      return count_one(tensors[i].const_data_ptr<decltype(zero)>(), tensors[i].numel());
    });
  }
  return counts;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("count_nonfinite", count_nonfinite); }

}  // namespace ringprune
