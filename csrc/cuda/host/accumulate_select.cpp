// accumulate_select on CUDA, the host side: seven launches, three for a small bucket, the upload of the table
// included.

#include <torch/library.h>

#include "accumulation.h"
#include "scratch.h"

namespace ringprune::cuda {
namespace {

std::tuple<at::Tensor, at::Tensor> accumulate_select(
    at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity, at::TensorList weights,
    const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out, at::ArrayRef<double> factors,
    at::ArrayRef<double> momentum, const c10::List<bool>& nesterov, std::string_view score,
    at::ArrayRef<double> parameters, at::IntArrayRef counts, const at::Tensor& hints, const at::Tensor& tally,
    const std::optional<at::Tensor>& sent, const std::optional<at::Tensor>& rest, bool masks) {
  const Accumulation arguments{"accumulate_select", grads,   residual, velocity, residual_out,
                               velocity_out,        factors, momentum, nesterov, {sent, rest, masks}};
  const Selection selection{weights, score, parameters, counts, hints, tally};
  const std::vector<int64_t> starts = selection.check(arguments, arguments.check());
  return with_score(arguments.op, score, [&](auto formula) {
    const Session session(residual);
    at::Tensor positions = session.empty(starts.back(), at::kInt);
    at::Tensor nonfinite = session.empty(static_cast<int64_t>(grads.size()), at::kLong);
    HostTable<Part> table = parts_of(arguments);
    add_weights(table, weights, parameters);
    Scratch scratch(session, table, counts, starts, positions, zeros_in(nonfinite));
    scratch.bucket.hints = hints.mutable_data_ptr<int32_t>();
    scratch.bucket.tally = tally.mutable_data_ptr<int64_t>();
    launch_accumulate_select<decltype(formula)>(session.stream(), scratch.bucket, state_of(arguments),
                                                nonfinite.mutable_data_ptr<int64_t>());
    arguments.mark();
    mark_written(hints);
    mark_written(tally);
    return std::make_tuple(positions, nonfinite);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("accumulate_select", accumulate_select); }

}  // namespace ringprune::cuda
