// put on the CPU: many tensors become zero but for the averaged values.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../checks.h"
#include "../tensors.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "put";
constexpr int64_t kBlock = 4096;  // entries cleared and written while they are in the first-level cache

void put(at::TensorList outputs, const at::Tensor& indices, const at::Tensor& values) {
  const std::vector<int64_t> offsets = offsets_of(kOp, "outputs", outputs);
  const int64_t numel = offsets.back();
  check_dtypes(kOp, "outputs", outputs);
  check_flat({kOp, "values"}, values, at::kFloat, indices.numel());
  check_indices(kOp, indices, numel);

  const int32_t* index = indices.const_data_ptr<int32_t>();
  const int32_t* index_end = index + indices.numel();
  const float* value = values.const_data_ptr<float>();
  // Threads own runs of the outputs, not of the indices: each entry is cleared and written by the same thread.
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      with_dtype({kOp, "outputs", tensor}, outputs[tensor], [&](auto zero) {
        using scalar_t = decltype(zero);
        scalar_t* output = outputs[tensor].mutable_data_ptr<scalar_t>() + (lo - offsets[tensor]);
        const int32_t* i = std::lower_bound(index, index_end, lo);
        for (int64_t block = lo; block < hi; block += kBlock) {
          const int64_t block_end = std::min(block + kBlock, hi);
          std::fill(output + (block - lo), output + (block_end - lo), zero);
          for (; i != index_end && *i < block_end; ++i) output[*i - lo] = static_cast<scalar_t>(value[i - index]);
        }
      });
    });
  });
  for (const at::Tensor& output : outputs) mark_written(output);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("put", put); }

}  // namespace ringprune
