// square_sum on CUDA, the host side: three launches, the upload of the table included.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kSquareSum = "square_sum";

// How many sums there are above those of the tiles: one for kSumTile of them, and so on up to one.
int64_t sums_above(int64_t tiles) {
  int64_t sums = 0;
  while (tiles > 1) sums += tiles = ceil_div<int64_t>(tiles, kSumTile);
  return sums;
}

at::Tensor square_sum(at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "ringprune::square_sum: no tensors");
  offsets_of(kSquareSum, "tensors", tensors, tensors[0].device());  // for its checks
  check_dtypes_or_double(kSquareSum, "tensors", tensors);
  const Session session(tensors[0]);
  HostTable<Part> table = parts_of(tensors, kSumTile);
  int64_t slots = table.tiles();
  for (Part& part : table.rows) {
    part.first_slot = slots;
    slots += sums_above(ceil_div<int64_t>(part.entries, kSumTile));
  }
  at::Tensor sums = session.empty(static_cast<int64_t>(tensors.size()), at::kDouble), rows;
  at::Tensor sums_of_tiles = session.empty(slots, at::kDouble);
  const Parts parts = table.send(session, rows);
  launch_square_sum(session.stream(), parts, sums_of_tiles.mutable_data_ptr<double>(), sums.mutable_data_ptr<double>());
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("square_sum", square_sum); }

}  // namespace ringprune::cuda
