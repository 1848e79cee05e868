// gather on CUDA, the host side: one launch.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kGather = "gather";

at::Tensor gather(const at::Tensor& residual, const at::Tensor& indices) {
  const at::Device device = residual.device();
  const int64_t numel = residual.numel(), count = indices.numel();
  check_flat({kGather, "residual"}, residual, at::kFloat, numel, device);
  check_indices_tensor(kGather, indices, numel, device);

  const Session session(residual);
  at::Tensor values = session.empty(count, at::kFloat);
  launch_gather(session.stream(), {indices.const_data_ptr<int32_t>(), count, numel}, residual.const_data_ptr<float>(),
                values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("gather", gather); }

}  // namespace ringprune::cuda
