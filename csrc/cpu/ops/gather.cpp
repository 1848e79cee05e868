// gather on the CPU: the values to be sent, which stay where they are.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "../../checks.h"
#include "../loops.h"
#include "../scattered.h"

namespace ringprune {
namespace {

constexpr const char* kGather = "gather";

at::Tensor gather(const at::Tensor& residual, const at::Tensor& indices) {
  const int64_t numel = residual.numel();
  check_flat({kGather, "residual"}, residual, at::kFloat, numel);
  check_flat({kGather, "indices"}, indices, at::kInt, indices.numel());
  check_positions(kGather, numel);

  at::Tensor values = at::empty({indices.numel()}, residual.options());
  const int32_t* index = indices.const_data_ptr<int32_t>();
  const float* from = residual.const_data_ptr<float>();
  float* to = values.mutable_data_ptr<float>();
  // Indices are checked a block at a time as they are used: nothing is written, and so they are read once.
  std::atomic<bool> fit{true};
  at::parallel_for(0, indices.numel(), kFewest, [&](int64_t begin, int64_t end) {
    for_each_block(begin, end, [&](int64_t lo, int64_t count) {
      if (!fit || !are_indices(index, lo, lo + count, numel)) {
        fit = false;
        return;
      }
      for (int64_t i = lo; i < lo + count; ++i) to[i] = from[index[i]];
    });
  });
  if (!fit) check_indices(kGather, indices, numel);
  return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("gather", gather); }

}  // namespace ringprune
