// take on CUDA, the host side: one launch, and the upload of the offsets where there is velocity.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kTake = "take";

at::Tensor take(const at::Tensor& residual, const std::optional<at::Tensor>& velocity, const at::Tensor& indices,
                at::IntArrayRef offsets) {
  const at::Device device = residual.device();
  const int64_t numel = residual.numel(), count = indices.numel();
  check_flat({kTake, "residual"}, residual, at::kFloat, numel, device);
  if (velocity) check_flat({kTake, "velocity"}, *velocity, at::kFloat, numel, device);
  check_offsets(kTake, offsets, numel);
  check_indices_tensor(kTake, indices, numel, device);
  check_take_apart(kTake, residual, velocity, indices);

  const Session session(residual);
  at::Tensor values = session.empty(count, at::kFloat), bounds;
  if (velocity) {
    std::vector<int64_t> padded(offsets.begin(), offsets.end());
    padded.resize(ceil_div<size_t>(padded.size(), 2) * 2);  // to whole words of 16 bytes
    bounds = session.empty(static_cast<int64_t>(padded.size()), at::kLong);
    upload(session.stream(), padded.data(), static_cast<int64_t>(bounds.nbytes()), bounds.mutable_data_ptr());
  }
  launch_take(session.stream(), velocity ? bounds.const_data_ptr<int64_t>() : nullptr,
              static_cast<int32_t>(offsets.size()) - 1, {indices.const_data_ptr<int32_t>(), count, numel},
              residual.mutable_data_ptr<float>(), velocity ? velocity->mutable_data_ptr<float>() : nullptr,
              values.mutable_data_ptr<float>());
  mark_written(residual);
  if (velocity) mark_written(*velocity);
  return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("take", take); }

}  // namespace ringprune::cuda
