// What encode_books and decode_books take on every device, and the checks of it (ringprune/ops/encode_books.py).

#pragma once

#include "books.h"
#include "checks.h"

namespace ringprune::books {

// Refuses what is no body of a message of that many values: uint8, as long as they need, beginning on a word.
inline void check_body(const char* op, const at::Tensor& body, int64_t values, int64_t levels, at::Device device) {
  TORCH_CHECK_VALUE(levels == 4 || levels == kMostLevels, "ringprune::", op, ": levels is ", levels,
                    "; 4 or 16 is needed");
  check_flat({op, "body"}, body, at::kByte, book_bytes(values, levels) + code_bytes(values, levels), device);
  TORCH_CHECK_VALUE(values == 0 || reinterpret_cast<uintptr_t>(body.const_data_ptr()) % 8 == 0, Name{op, "body"}.str(),
                    " does not begin at a multiple of 8 bytes");
}

inline void check_encode(const at::Tensor& values, const at::Tensor& rest, const at::Tensor& body, int64_t levels) {
  constexpr const char* kOp = "encode_books";
  const at::Device device = values.device();
  check_flat({kOp, "values"}, values, at::kFloat, values.numel(), device);
  check_flat({kOp, "rest"}, rest, at::kFloat, values.numel(), device);
  check_body(kOp, body, values.numel(), levels, device);
  if (values.numel() == 0) return;
  if (rest.const_data_ptr() != values.const_data_ptr()) check_overlap({kOp, "rest"}, rest, {kOp, "values"}, values);
  check_overlap({kOp, "body"}, body, {kOp, "values"}, values);
  check_overlap({kOp, "body"}, body, {kOp, "rest"}, rest);
}

inline void check_decode(const at::Tensor& body, const at::Tensor& values, int64_t levels) {
  constexpr const char* kOp = "decode_books";
  check_flat({kOp, "values"}, values, at::kFloat, values.numel(), values.device());
  check_body(kOp, body, values.numel(), levels, values.device());
  if (values.numel()) check_overlap({kOp, "values"}, values, {kOp, "body"}, body);
}

}  // namespace ringprune::books
