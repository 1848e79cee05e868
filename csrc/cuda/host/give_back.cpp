// give_back on CUDA, the host side: one launch.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kGiveBack = "give_back";

void give_back(const at::Tensor& residual, const at::Tensor& indices, const at::Tensor& values) {
  const at::Device device = residual.device();
  const int64_t numel = residual.numel(), count = indices.numel();
  check_flat({kGiveBack, "residual"}, residual, at::kFloat, numel, device);
  check_indices_tensor(kGiveBack, indices, numel, device);
  check_flat({kGiveBack, "values"}, values, at::kFloat, count, device);
  check_give_back_apart(kGiveBack, residual, indices, values);

  const Session session(residual);
  launch_give_back(session.stream(), {indices.const_data_ptr<int32_t>(), count, numel}, values.const_data_ptr<float>(),
                   residual.mutable_data_ptr<float>());
  mark_written(residual);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("give_back", give_back); }

}  // namespace ringprune::cuda
