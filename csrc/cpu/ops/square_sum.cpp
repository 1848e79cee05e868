// square_sum on the CPU: sums of squares in double, added in one fixed tree.
//
// Every aligned block of kBlock entries, a power of two, is a subtree of its own, so threads may take blocks in any
// number and order without changing a bit.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../bucket.h"
#include "../tree_sum.h"

namespace ringprune {
namespace {

constexpr const char* kSquareSum = "square_sum";
static_assert((kBlock & (kBlock - 1)) == 0);

// Calls sum(start, count) for each block, on all threads, and adds what it returns.
template <class Sum>
double sum_blocks(int64_t entries, const Sum& sum) {
  std::vector<double> sums((entries + kBlock - 1) / kBlock);
  at::parallel_for(0, static_cast<int64_t>(sums.size()), kGrain / kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      sums[block] = sum(block * kBlock, std::min(kBlock, entries - block * kBlock));
    }
  });
  return tree_sum(sums.data(), static_cast<int64_t>(sums.size()));
}

double sum_one(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kDouble) {
    const double* from = tensor.const_data_ptr<double>();
    return sum_blocks(tensor.numel(), [&](int64_t start, int64_t count) {
      std::array<double, kBlock> squares;
      for (int64_t i = 0; i < count; ++i) squares[i] = from[start + i] * from[start + i];
      return tree_sum(squares.data(), count);
    });
  }
  const Loops& loop = loops();
  const Entries entries(tensor);
  return sum_blocks(tensor.numel(), [&](int64_t start, int64_t count) {
    std::array<float, kBlock> room;
    return loop.square_sum(entries.at(loop, start, count, room.data()), count);
  });
}

at::Tensor square_sum(at::TensorList tensors) {
  offsets_of(kSquareSum, "tensors", tensors);  // for its checks
  check_dtypes_or_double(kSquareSum, "tensors", tensors);
  at::Tensor sums = at::empty({static_cast<int64_t>(tensors.size())}, at::TensorOptions().dtype(at::kDouble));
  double* sum = sums.mutable_data_ptr<double>();
  for (size_t i = 0; i < tensors.size(); ++i) sum[i] = sum_one(tensors[i]);
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("square_sum", square_sum); }

}  // namespace ringprune
