// count_nonfinite on the CPU: how many entries of each tensor are NaN or infinite.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "../bucket.h"

namespace ringprune {
namespace {

constexpr const char* kCountNonfinite = "count_nonfinite";

// Calls count(start, entries) for blocks of the tensor, on all threads, and adds what it returns.
template <class Count>
int64_t count_blocks(int64_t entries, const Count& count) {
  std::atomic<int64_t> total{0};
  at::parallel_for(0, entries, kGrain, [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for_each_block(begin, end, [&](int64_t start, int64_t number) { found += count(start, number); });
    total += found;
  });
  return total;
}

int64_t count_one(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kDouble) {
    const double* from = tensor.const_data_ptr<double>();
    return count_blocks(tensor.numel(), [&](int64_t start, int64_t number) {
      return std::count_if(from + start, from + start + number, [](double value) { return !std::isfinite(value); });
    });
  }
  const Loops& loop = loops();
  const Entries entries(tensor);
  return count_blocks(tensor.numel(), [&](int64_t start, int64_t number) {
    std::array<float, kBlock> room;
    return loop.count_nonfinite(entries.at(loop, start, number, room.data()), number);
  });
}

at::Tensor count_nonfinite(at::TensorList tensors) {
  offsets_of(kCountNonfinite, "tensors", tensors);  // for its checks
  check_dtypes_or_double(kCountNonfinite, "tensors", tensors);
  at::Tensor counts = at::empty({static_cast<int64_t>(tensors.size())}, at::TensorOptions().dtype(at::kLong));
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < tensors.size(); ++i) count[i] = count_one(tensors[i]);
  return counts;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("count_nonfinite", count_nonfinite); }

}  // namespace ringprune
