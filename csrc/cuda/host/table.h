// The host side of every op: tables of tensors, their way to the device, and scratch memory.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <vector>

#include "../../checks.h"
#include "../launch.h"
#include "../parts.h"
#include "../upload.h"

namespace ringprune::cuda {

// Makes the tensors' device the current one while it lives. The stream is the caller's current one.
class Session {
 public:
  explicit Session(const at::Tensor& tensor) : guard_(tensor.device()), device_(tensor.device()) {}

  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }

  // Memory of the caching allocator: what runs later on this stream may use it again, nothing earlier is still running.
  at::Tensor empty(int64_t count, at::ScalarType dtype) const {
    return at::empty({count}, at::TensorOptions().dtype(dtype).device(device_));
  }
  template <class T>
  at::Tensor empty_of(int64_t count) const {
    return empty(count * static_cast<int64_t>(sizeof(T)), at::kByte);
  }

 private:
  c10::cuda::OptionalCUDAGuard guard_;
  at::Device device_;
};

inline Type type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return Type::kHalf;
    case at::kBFloat16:
      return Type::kBFloat16;
    case at::kDouble:
      return Type::kDouble;
    default:
      return Type::kFloat;
  }
}

// One row per tensor, as yet on the host. Each op fills in what it needs.
template <class Row>
class HostTable {
 public:
  explicit HostTable(size_t tensors) : rows(tensors) {}

  std::vector<Row> rows;

  // Lays the tensors one after another, in tiles of `tile` entries; entries_of(i) is how many the i-th has.
  template <class EntriesOf>
  void lay_out(const EntriesOf& entries_of, int64_t tile = kTile) {
    int64_t start = 0, tiles = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].start = start;
      rows[i].entries = entries_of(i);
      rows[i].first_tile = static_cast<int32_t>(tiles);
      start += rows[i].entries;
      tiles += ceil_div(rows[i].entries, tile);
    }
    TORCH_CHECK_VALUE(tiles <= INT32_MAX, "ringprune: ", start, " entries together are more than a launch can take");
    tiles_ = static_cast<int32_t>(tiles);
  }

  int32_t tiles() const { return tiles_; }

  // Sends the rows to the device, into `memory`, and zeros what is to be zeroed.
  Table<Row> send(const Session& session, at::Tensor& memory, Zeros first = {}, Zeros second = {},
                  Zeros third = {}) const {
    const auto count = static_cast<int64_t>(rows.size());
    const size_t bytes = rows.size() * sizeof(Row);
    std::vector<char> image(bytes + ceil_div(rows.size() * sizeof(int32_t), size_t{16}) * 16);
    std::memcpy(image.data(), rows.data(), bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(image.data() + bytes + i * sizeof(int32_t), &rows[i].first_tile, sizeof(int32_t));
    }
    memory = session.empty(static_cast<int64_t>(image.size()), at::kByte);
    upload(session.stream(), image.data(), static_cast<int64_t>(image.size()), memory.mutable_data_ptr(), first, second,
           third);
    const char* sent = static_cast<const char*>(memory.const_data_ptr());
    return {reinterpret_cast<const Row*>(sent),
            reinterpret_cast<const int32_t*>(sent + bytes),
            static_cast<int32_t>(count),
            tiles_,
            0,
            0,
            0};
  }

 private:
  int32_t tiles_ = 0;
};

// A table of tensors that are read.
inline HostTable<Part> parts_of(at::TensorList tensors, int64_t tile = kTile) {
  HostTable<Part> table(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    table.rows[i].grad = tensors[i].const_data_ptr();
    table.rows[i].grad_type = type_of(tensors[i]);
  }
  table.lay_out([&](size_t i) { return tensors[i].numel(); }, tile);
  return table;
}

// Adds the weights that belong to the tensors.
inline void add_weights(HostTable<Part>& table, at::TensorList weights, at::ArrayRef<double> parameters) {
  for (size_t i = 0; i < table.rows.size(); ++i) {
    table.rows[i].weight = weights[i].const_data_ptr();
    table.rows[i].weight_type = type_of(weights[i]);
    table.rows[i].parameter = static_cast<float>(parameters[i]);
  }
}

inline Zeros zeros_in(at::Tensor& tensor) { return {tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes())}; }

}  // namespace ringprune::cuda
