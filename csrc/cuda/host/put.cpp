// put on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "../../tensors.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

constexpr const char* kPut = "put";

void put(at::TensorList outputs, const at::Tensor& indices, const at::Tensor& values) {
  const at::Device device = values.device();
  const int64_t numel = offsets_of(kPut, "outputs", outputs, device).back();
  check_dtypes(kPut, "outputs", outputs);
  check_flat({kPut, "values"}, values, at::kFloat, indices.numel(), device);
  check_indices_tensor(kPut, indices, numel, device);
  check_put_apart(kPut, outputs, indices, values);

  const Session session(values);
  HostTable<Output> table(outputs.size());
  table.lay_out([&](size_t i) { return outputs[i].numel(); });
  for (size_t i = 0; i < outputs.size(); ++i) {
    table.rows[i].memory = outputs[i].mutable_data_ptr();
    table.rows[i].type = type_of(outputs[i]);
  }
  at::Tensor rows;
  const Indices at{indices.const_data_ptr<int32_t>(), indices.numel(), numel};
  launch_put(session.stream(), table.send(session, rows), at, values.const_data_ptr<float>());
  for (const at::Tensor& output : outputs) mark_written(output);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("put", put); }

}  // namespace ringprune::cuda
