// Walking over many tensors laid one after another, and over their dtypes.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "arithmetic.h"
#include "checks.h"

namespace ringprune {

// Calls body(tensor, lo, hi) for every run of flat positions [lo, hi) inside [begin, end) that lies in one tensor.
template <class Body>
void for_each_run(at::IntArrayRef offsets, int64_t begin, int64_t end, const Body& body) {
  int64_t tensor = std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1;
  for (int64_t lo = begin; lo < end; ++tensor) {
    const int64_t hi = std::min(end, offsets[tensor + 1]);
    if (lo < hi) body(tensor, lo, hi);
    lo = hi;
  }
}

// Calls body with the score of that name (ringprune/ops/importance.py).
template <class Body>
auto with_score(const char* op, std::string_view name, const Body& body) {
  if (name == "ratio") return body(Ratio{});
  if (name == "magnitude") return body(Magnitude{});
  if (name == "sum") return body(Sum{});
  if (name == "product") return body(Product{});
  TORCH_CHECK_VALUE(false, "ringprune::", op, ": score is '", std::string(name),
                    "'; one of ratio, magnitude, sum, product is needed");
}

// Calls body with a zero of the tensor's element type; refuses dtypes other than float32, float16 and bfloat16.
template <class Body>
auto with_dtype(const Name& name, const at::Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return body(float{});
    case at::kHalf:
      return body(at::Half{});
    case at::kBFloat16:
      return body(at::BFloat16{});
    default:
      TORCH_CHECK_TYPE(false, name.str(), " is ", tensor.scalar_type(), "; Float, Half or BFloat16 is needed");
  }
}

// The same, and float64 is allowed too.
template <class Body>
auto with_dtype_or_double(const Name& name, const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kDouble) return body(double{});
  return with_dtype(name, tensor, body);
}

// Refuses tensors of other dtypes before anything is written.
inline void check_dtypes(const char* op, const char* argument, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    with_dtype({op, argument, static_cast<int64_t>(i)}, tensors[i], [](auto) {});
  }
}

// The same, and float64 is allowed too.
inline void check_dtypes_or_double(const char* op, const char* argument, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    with_dtype_or_double({op, argument, static_cast<int64_t>(i)}, tensors[i], [](auto) {});
  }
}

}  // namespace ringprune
