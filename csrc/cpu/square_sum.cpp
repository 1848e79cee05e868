// square_sum on the CPU: sums of squares in double, added in one fixed tree.
//
// The tree adds neighbours in pairs, then the sums of neighbours, and so on. Every aligned block of kBlock entries is a
// subtree of its own, so threads may take blocks in any number and order without changing a bit.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "../checks.h"
#include "../tensors.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "square_sum";
constexpr int64_t kBlock = 1024;  // entries; a power of two

// Sums `x` by pairs of neighbours, in place; an entry without neighbour is kept, as adding zero would.
double tree_sum(double* x, int64_t count) {
  if (count == 0) return 0.0;
  for (; count > 1; count = (count + 1) / 2) {
    for (int64_t i = 0; i < count / 2; ++i) x[i] = x[2 * i] + x[2 * i + 1];
    if (count % 2) x[count / 2] = x[count - 1];
  }
  return x[0];
}

template <class scalar_t>
double sum_one(const scalar_t* x, int64_t count) {
  std::vector<double> sums((count + kBlock - 1) / kBlock);
  at::parallel_for(0, static_cast<int64_t>(sums.size()), kGrain / kBlock, [&](int64_t begin, int64_t end) {
    std::array<double, kBlock> squares;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBlock;
      const int64_t entries = std::min(kBlock, count - start);
      for (int64_t i = 0; i < entries; ++i) {
        const auto value = static_cast<double>(x[start + i]);
        squares[i] = value * value;
      }
      sums[block] = tree_sum(squares.data(), entries);
    }
  });
  return tree_sum(sums.data(), static_cast<int64_t>(sums.size()));
}

at::Tensor square_sum(at::TensorList tensors) {
  offsets_of(kOp, "tensors", tensors);  // for its checks
  at::Tensor sums = at::empty({static_cast<int64_t>(tensors.size())}, at::TensorOptions().dtype(at::kDouble));
  double* sum = sums.mutable_data_ptr<double>();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Name name{kOp, "tensors", static_cast<int64_t>(i)};
    sum[i] = with_dtype_or_double(name, tensors[i], [&](auto zero) {
      return sum_one(tensors[i].const_data_ptr<decltype(zero)>(), tensors[i].numel());
    });
  }
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("square_sum", square_sum); }

}  // namespace ringprune
