// What every kernel checks before it touches memory: dtype, device, layout, sizes, indices, overlap.
//
// The messages name op, argument, value and what is needed; ringprune/ops/checks.py is the same for Python callers.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ringprune {

// Entries given to one thread at least; below, starting a thread costs more than it saves.
constexpr int64_t kGrain = 32768;

// An argument and what messages call it, for example {"take", "residual"} or {"put", "outputs", 3}.
struct Name {
  const char* op;
  const char* argument;
  int64_t position = -1;

  std::string str() const {
    std::string text = std::string("ringprune::") + op + ": " + argument;
    return position < 0 ? text : text + "[" + std::to_string(position) + "]";
  }
};

// Refuses what the kernels cannot read through a plain pointer on `device`.
inline void check_dense(const Name& name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_TYPE(tensor.defined(), name.str(), " is missing; a tensor is needed");
  TORCH_CHECK_VALUE(tensor.device() == device, name.str(), " is on ", tensor.device(), "; ", device, " is needed");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(), name.str(), " (shape ", tensor.sizes(),
                    ") is not contiguous; a dense contiguous tensor is needed");
  const auto needed = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size() + tensor.nbytes();
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.storage().nbytes() >= needed, name.str(), " needs ", needed,
                    " bytes and its storage has ", tensor.storage().nbytes(), ": its memory has been given back");
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  TORCH_CHECK_VALUE(tensor.numel() == 0 || address % tensor.element_size() == 0, name.str(),
                    " starts between two entries of memory (address ", address, ", entries of ", tensor.element_size(),
                    " bytes); a tensor of its own is needed, as clone() makes it");
}

// Refuses what is not a contiguous 1-D tensor of `numel` entries of `dtype`.
inline void check_flat(const Name& name, const at::Tensor& tensor, at::ScalarType dtype, int64_t numel,
                       at::Device device = at::kCPU) {
  check_dense(name, tensor, device);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name.str(), " is ", tensor.scalar_type(), "; ", dtype, " is needed");
  TORCH_CHECK_VALUE(tensor.dim() == 1, name.str(), " has shape ", tensor.sizes(), "; one dimension is needed");
  TORCH_CHECK_VALUE(tensor.numel() == numel, name.str(), " has ", tensor.numel(), " entries; ", numel, " are needed");
}

// Refuses what has not one value per tensor.
inline void check_length(const Name& name, size_t length, size_t tensors) {
  TORCH_CHECK_VALUE(length == tensors, name.str(), " has ", length, " values; ", tensors,
                    " are needed, one per tensor");
}

// Refuses what is not one number of float32's range, at least `low`, per tensor.
inline void check_numbers(const Name& name, at::ArrayRef<double> values, size_t tensors,
                          double low = -std::numeric_limits<float>::max()) {
  check_length(name, values.size(), tensors);
  for (size_t i = 0; i < values.size(); ++i) {
    TORCH_CHECK_VALUE(low <= values[i] && values[i] <= std::numeric_limits<float>::max(),
                      Name{name.op, name.argument, static_cast<int64_t>(i)}.str(), " = ", values[i],
                      "; a finite number of float32", low < 0 ? "" : " that is >= 0", " is needed");
  }
}

// Checks every tensor and returns where each starts when all are laid one after another; the total comes last.
inline std::vector<int64_t> offsets_of(const char* op, const char* argument, at::TensorList tensors,
                                       at::Device device = at::kCPU) {
  std::vector<int64_t> offsets{0};
  offsets.reserve(tensors.size() + 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_dense({op, argument, static_cast<int64_t>(i)}, tensors[i], device);
    offsets.push_back(offsets.back() + tensors[i].numel());
  }
  return offsets;
}

// Refuses offsets that do not rise from 0 to `numel`.
inline void check_offsets(const char* op, at::IntArrayRef offsets, int64_t numel) {
  const std::string name = Name{op, "offsets"}.str();
  TORCH_CHECK_VALUE(!offsets.empty() && offsets.front() == 0 && offsets.back() == numel, name, " = ", offsets,
                    "; they must go from 0 to ", numel);
  for (size_t i = 1; i < offsets.size(); ++i) {
    TORCH_CHECK_VALUE(offsets[i] >= offsets[i - 1], name, "[", i, "] = ", offsets[i], " is below ", name, "[", i - 1,
                      "] = ", offsets[i - 1], "; they must not fall");
  }
}

// Refuses more entries than int32 positions can tell apart.
inline void check_positions(const char* op, int64_t numel) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(numel <= kMost, "ringprune::", op, ": ", numel, " entries together; at most ", kMost,
                    " are allowed, for positions are int32");
}

// Refuses what cannot be ascending positions below `numel`; it looks at none of them.
inline void check_indices_tensor(const char* op, const at::Tensor& indices, int64_t numel, at::Device device,
                                 const char* name = "indices") {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check_flat({op, name}, indices, at::kInt, indices.numel(), device);
  check_positions(op, numel);
  TORCH_CHECK_VALUE(indices.numel() <= kMost, Name{op, name}.str(), " has ", indices.numel(), " entries; at most ",
                    kMost, " int32 numbers from 0 on ascend strictly");
}

// Whether index[begin ... end - 1] are strictly ascending, the one before included, and in [0, numel).
inline bool are_indices(const int32_t* index, int64_t begin, int64_t end, int64_t numel) {
  if (begin == end) return true;
  int32_t falls = 0;  // no early end: the compiler makes vectors of this
#pragma omp simd reduction(| : falls)
  for (int64_t i = std::max<int64_t>(begin, 1); i < end; ++i) falls |= index[i] <= index[i - 1];
  return !falls && index[begin] >= 0 && index[end - 1] < numel;  // whoever ascends lies between the ends
}

// Refuses indices that are not int32, 1-D and strictly ascending in [0, numel); names the first that is wrong.
inline void check_indices(const char* op, const at::Tensor& indices, int64_t numel, const char* name = "indices") {
  check_indices_tensor(op, indices, numel, at::kCPU, name);
  const int32_t* index = indices.const_data_ptr<int32_t>();
  const int64_t count = indices.numel();
  std::atomic<bool> good{true};
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    if (!are_indices(index, begin, end, numel)) good = false;
  });
  if (good) return;
  const auto fits = [&](int64_t i) { return index[i] >= 0 && index[i] < numel && (i == 0 || index[i] > index[i - 1]); };
  int64_t bad = 0;
  while (bad + 1 < count && fits(bad)) ++bad;
  TORCH_CHECK_VALUE(index[bad] >= 0 && index[bad] < numel, Name{op, name, bad}.str(), " = ", index[bad],
                    " is not in [0, ", numel, ")");
  TORCH_CHECK_VALUE(false, Name{op, name, bad}.str(), " = ", index[bad], " is not above ", name, "[", bad - 1,
                    "] = ", index[bad - 1], "; they must be strictly ascending");
}

// Refuses counts that are not between 0 and the entries of each tensor; returns where each tensor's positions start.
inline std::vector<int64_t> check_counts(const char* op, at::IntArrayRef counts, at::IntArrayRef offsets) {
  const auto tensors = static_cast<int64_t>(offsets.size()) - 1;
  check_length({op, "counts"}, counts.size(), tensors);
  std::vector<int64_t> starts{0};
  for (int64_t i = 0; i < tensors; ++i) {
    const int64_t entries = offsets[i + 1] - offsets[i];
    TORCH_CHECK_VALUE(0 <= counts[i] && counts[i] <= entries, Name{op, "counts", i}.str(), " = ", counts[i], "; 0 to ",
                      entries, " is allowed, the entries of tensor ", i);
    starts.push_back(starts.back() + counts[i]);
  }
  return starts;
}

// Refuses two tensors that share memory.
inline void check_overlap(const Name& written, const at::Tensor& tensor, const Name& other_name,
                          const at::Tensor& other) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto other_start = reinterpret_cast<uintptr_t>(other.const_data_ptr());
  const uintptr_t end = start + tensor.nbytes();
  const uintptr_t other_end = other_start + other.nbytes();
  TORCH_CHECK_VALUE(std::max(start, other_start) >= std::min(end, other_end), written.str(), " shares memory with ",
                    other_name.argument,
                    other_name.position < 0 ? std::string() : "[" + std::to_string(other_name.position) + "]");
}

// Refuses tensors of a list that share memory with each other.
inline void check_apart(const char* op, const char* argument, at::TensorList tensors) {
  std::vector<std::pair<uintptr_t, int64_t>> starts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    starts.emplace_back(reinterpret_cast<uintptr_t>(tensors[i].const_data_ptr()), static_cast<int64_t>(i));
  }
  std::sort(starts.begin(), starts.end());
  for (size_t i = 1; i < starts.size(); ++i) {
    const auto [one, other] = std::minmax(starts[i - 1].second, starts[i].second);
    check_overlap({op, argument, one}, tensors[one], {op, argument, other}, tensors[other]);
  }
}

// Refuses outputs of a put that share memory with each other or with what is read while they are written.
inline void check_put_apart(const char* op, at::TensorList outputs, const at::Tensor& indices,
                            const at::Tensor& values) {
  check_apart(op, "outputs", outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Name name{op, "outputs", static_cast<int64_t>(i)};
    check_overlap(name, outputs[i], {op, "indices"}, indices);
    check_overlap(name, outputs[i], {op, "values"}, values);
  }
}

// Refuses state of a take that shares memory with the other or with the indices.
inline void check_take_apart(const char* op, const at::Tensor& residual, const std::optional<at::Tensor>& velocity,
                             const at::Tensor& indices) {
  check_overlap({op, "residual"}, residual, {op, "indices"}, indices);
  if (!velocity) return;
  check_overlap({op, "velocity"}, *velocity, {op, "residual"}, residual);
  check_overlap({op, "velocity"}, *velocity, {op, "indices"}, indices);
}

// Refuses a residual that shares memory with what is given back to it.
inline void check_give_back_apart(const char* op, const at::Tensor& residual, const at::Tensor& indices,
                                  const at::Tensor& values) {
  check_overlap({op, "residual"}, residual, {op, "indices"}, indices);
  check_overlap({op, "residual"}, residual, {op, "values"}, values);
}

// Tells autograd that the tensor has changed, as torch's own in-place ops do.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ringprune
