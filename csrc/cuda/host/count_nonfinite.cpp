// count_nonfinite on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kCountNonfinite = "count_nonfinite";

at::Tensor count_nonfinite(at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "ringprune::count_nonfinite: no tensors");
  offsets_of(kCountNonfinite, "tensors", tensors, tensors[0].device());  // for its checks
  check_dtypes_or_double(kCountNonfinite, "tensors", tensors);
  const Session session(tensors[0]);
  at::Tensor counts = session.empty(static_cast<int64_t>(tensors.size()), at::kLong), rows;
  const Parts parts = parts_of(tensors).send(session, rows, zeros_in(counts));
  launch_count_nonfinite(session.stream(), parts, counts.mutable_data_ptr<int64_t>());
  return counts;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("count_nonfinite", count_nonfinite); }

}  // namespace ringprune::cuda
