// accumulate on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "accumulation.h"

namespace ringprune::cuda {
namespace {

at::Tensor accumulate(at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity,
                      const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out,
                      at::ArrayRef<double> factors, at::ArrayRef<double> momentum, const c10::List<bool>& nesterov,
                      const std::optional<at::Tensor>& sent, const std::optional<at::Tensor>& rest, bool masks) {
  const Accumulation arguments{"accumulate", grads,   residual, velocity, residual_out,
                               velocity_out, factors, momentum, nesterov, {sent, rest, masks}};
  arguments.check();
  const Session session(residual);
  at::Tensor nonfinite = session.empty(static_cast<int64_t>(grads.size()), at::kLong), rows;
  const Parts parts = parts_of(arguments).send(session, rows, zeros_in(nonfinite));
  launch_accumulate(session.stream(), parts, state_of(arguments), nonfinite.mutable_data_ptr<int64_t>());
  arguments.mark();
  return nonfinite;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("accumulate", accumulate); }

}  // namespace ringprune::cuda
