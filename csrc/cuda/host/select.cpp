// select on CUDA, the host side: six launches, two for a small bucket, the upload of the table
// included.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "scratch.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kSelect = "select";

at::Tensor select(const at::Tensor& scores, at::IntArrayRef offsets, at::IntArrayRef counts) {
  check_flat({kSelect, "scores"}, scores, at::kFloat, scores.numel(), scores.device());
  check_offsets(kSelect, offsets, scores.numel());
  check_positions(kSelect, scores.numel());
  const std::vector<int64_t> starts = check_counts(kSelect, counts, offsets);

  const Session session(scores);
  at::Tensor positions = session.empty(starts.back(), at::kInt);
  if (starts.back() == 0) return positions;
  HostTable<Part> table(counts.size());
  table.lay_out([&](size_t i) { return offsets[i + 1] - offsets[i]; });
  const Scratch scratch(session, table, counts, starts, positions);
  launch_select(session.stream(), scratch.bucket, scores.const_data_ptr<float>());
  return positions;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("select", select); }

}  // namespace ringprune::cuda
