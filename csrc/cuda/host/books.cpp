// encode_books and decode_books on CUDA, the host side: one launch each.

#include <torch/library.h>

#include "../../coded.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

void encode_books(const at::Tensor& values, const at::Tensor& rest, const at::Tensor& body, int64_t levels) {
  books::check_encode(values, rest, body, levels);
  const Session session(values);
  launch_encode_books(session.stream(), values.const_data_ptr<float>(), values.numel(), levels,
                      rest.mutable_data_ptr<float>(), body.mutable_data_ptr<uint8_t>());
  mark_written(rest);
  mark_written(body);
}

void decode_books(const at::Tensor& body, const at::Tensor& values, int64_t levels, bool add) {
  books::check_decode(body, values, levels);
  const Session session(values);
  launch_decode_books(session.stream(), body.const_data_ptr<uint8_t>(), values.numel(), levels, add,
                      values.mutable_data_ptr<float>());
  mark_written(values);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) {
  m.impl("encode_books", encode_books);
  m.impl("decode_books", decode_books);
}

}  // namespace ringprune::cuda
