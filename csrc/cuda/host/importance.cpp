// importance on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kImportance = "importance";

at::Tensor importance(const at::Tensor& residual, at::TensorList weights, std::string_view score,
                      at::ArrayRef<double> parameters) {
  const std::vector<int64_t> offsets = offsets_of(kImportance, "weights", weights, residual.device());
  check_dtypes(kImportance, "weights", weights);
  check_flat({kImportance, "residual"}, residual, at::kFloat, offsets.back(), residual.device());
  check_numbers({kImportance, "parameters"}, parameters, weights.size(), 0.0);
  return with_score(kImportance, score, [&](auto formula) {
    const Session session(residual);
    at::Tensor scores = session.empty(offsets.back(), at::kFloat), rows;
    HostTable<Part> table(weights.size());
    table.lay_out([&](size_t i) { return weights[i].numel(); });
    add_weights(table, weights, parameters);
    const Parts parts = table.send(session, rows);
    launch_importance<decltype(formula)>(session.stream(), parts, residual.const_data_ptr<float>(),
                                         scores.mutable_data_ptr<float>());
    return scores;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("importance", importance); }

}  // namespace ringprune::cuda
