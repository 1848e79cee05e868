// put on the CPU: many tensors become zero but for the averaged values.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../bucket.h"

namespace ringprune {
namespace {

constexpr const char* kPut = "put";

void put(at::TensorList outputs, const at::Tensor& indices, const at::Tensor& values) {
  const std::vector<int64_t> offsets = offsets_of(kPut, "outputs", outputs);
  const int64_t numel = offsets.back();
  check_dtypes(kPut, "outputs", outputs);
  check_flat({kPut, "values"}, values, at::kFloat, indices.numel());
  check_indices(kPut, indices, numel);
  check_put_apart(kPut, outputs, indices, values);

  const int32_t* index = indices.const_data_ptr<int32_t>();
  const int32_t* index_end = index + indices.numel();
  const float* value = values.const_data_ptr<float>();
  const Loops& loop = loops();
  // Threads own runs of the outputs, not of the indices: each entry is cleared and written by the same thread.
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      with_dtype({kPut, "outputs", tensor}, outputs[tensor], [&](auto zero) {
        using scalar_t = decltype(zero);
        const bool streams = numel >= kStreamed && std::is_same_v<scalar_t, float>;
        scalar_t* output = outputs[tensor].mutable_data_ptr<scalar_t>();
        alignas(64) std::array<scalar_t, kBlock> room;  // zeros but for the values of the block at hand
        if (streams) room.fill(zero);
        const int32_t* i = std::lower_bound(index, index_end, lo);
        for_each_block(lo, hi, [&](int64_t at, int64_t entries) {
          scalar_t* place = output + (at - offsets[tensor]);
          scalar_t* to = streams ? room.data() : place;
          if (!streams) std::fill(to, to + entries, zero);
          const int32_t* first = i;
          for (; i != index_end && *i < at + entries; ++i) to[*i - at] = static_cast<scalar_t>(value[i - index]);
          if constexpr (std::is_same_v<scalar_t, float>) {
            if (!streams) return;
            loop.stream(to, entries, place);
            for (; first != i; ++first) to[*first - at] = zero;
          }
        });
      });
    });
    loop.fence();
  });
  for (const at::Tensor& output : outputs) mark_written(output);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("put", put); }

}  // namespace ringprune
