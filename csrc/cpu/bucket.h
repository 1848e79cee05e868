// A bucket on the CPU: where the entries of its tensors are, and runs of them for the loops.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <vector>

#include "../accumulation.h"
#include "loops.h"

namespace ringprune {

// Has the memory fetch what is about to be read, while something else is done.
inline void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// A tensor's entries as the loops want them: in place where they are float32, else widened block by block.
class Entries {
 public:
  explicit Entries(const at::Tensor& tensor)
      : data_(static_cast<const char*>(tensor.const_data_ptr())),
        size_(static_cast<int64_t>(tensor.element_size())),
        dtype_(tensor.scalar_type()) {}

  // Entries [start, start + count), count <= kBlock; `room` holds them where they have to be widened.
  const float* at(const Loops& loops, int64_t start, int64_t count, float* room) const {
    const char* from = data_ + start * size_;
    if (dtype_ == at::kFloat) return reinterpret_cast<const float*>(from);
    (dtype_ == at::kHalf ? loops.widen_half : loops.widen_bfloat16)(from, count, room);
    return room;
  }

  // Prefetches entries [start, start + count).
  void ahead(int64_t start, int64_t count) const { prefetch(data_ + start * size_, count * size_); }

 private:
  const char* data_;
  int64_t size_;
  at::ScalarType dtype_;
};

inline std::vector<Entries> entries_of(at::TensorList tensors) { return {tensors.begin(), tensors.end()}; }

inline ScoreNumber number_of(Ratio) { return kRatio; }
inline ScoreNumber number_of(Magnitude) { return kMagnitude; }
inline ScoreNumber number_of(Sum) { return kSum; }
inline ScoreNumber number_of(Product) { return kProduct; }

// What one thread needs besides: gradients and weights widened.
struct Rooms {
  alignas(64) std::array<float, kBlock> grad;
  alignas(64) std::array<float, kBlock> weight;
};

// What was sent of a bucket's state, for the passes that read it.
class Leaving {
 public:
  Leaving(const Sent& sent, at::IntArrayRef offsets) {
    if (!sent.indices) return;
    first_ = sent.indices->const_data_ptr<int32_t>();
    end_ = first_ + sent.indices->numel();
    if (sent.rest) rest_ = sent.rest->const_data_ptr<float>();
    masked_.reserve(offsets.size() - 1);
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      const bool whole = from(offsets[i + 1]) - from(offsets[i]) == offsets[i + 1] - offsets[i];
      masked_.push_back(sent.masks && !whole);
    }
  }

  // Notes what is gone of flat positions [lo, lo + count) of a tensor; `next` lies at or before the first of it, and is
  // moved behind the last. Field by field, as loops_body.h says of copies.
  void note(Gone& gone, int64_t tensor, int64_t lo, int64_t count, const int32_t*& next) const {
    while (next != end_ && *next < lo) ++next;
    const int32_t* first = next;
    while (next != end_ && *next < lo + count) ++next;
    gone.entry = first;
    gone.count = next - first;
    gone.rest = rest_ ? rest_ + (first - first_) : nullptr;
    gone.base = lo;
    gone.masked = first != next && masked_[tensor];
  }

  // The first that lies at or behind a flat position.
  const int32_t* from(int64_t position) const { return std::lower_bound(first_, end_, position); }

 private:
  const int32_t* first_ = nullptr;
  const int32_t* end_ = nullptr;
  const float* rest_ = nullptr;
  std::vector<bool> masked_;  // tensors whose velocities leave as well
};

// The flat state of a bucket and what enters it; runs are made from here.
class Bucket {
 public:
  Bucket(const Accumulation& given, at::IntArrayRef offsets)
      : offsets_(offsets),
        grads_(entries_of(given.grads)),
        given_(given),
        residual_(given.residual.const_data_ptr<float>()),
        velocity_(given.velocity ? given.velocity->const_data_ptr<float>() : nullptr),
        residual_out_(given.residual_out.mutable_data_ptr<float>()),
        velocity_out_(given.velocity_out ? given.velocity_out->mutable_data_ptr<float>() : nullptr),
        streams_(residual_out_ != residual_ && (velocity_ == nullptr || velocity_out_ != velocity_) &&
                 offsets.back() >= kStreamed),
        leaving_(given.sent, offsets) {}

  Correction correction(int64_t tensor) const {
    if (velocity_ == nullptr) return kNoMomentum;
    return given_.nesterov.get(tensor) ? kNesterov : kMomentum;
  }

  const Leaving& leaving() const { return leaving_; }

  // The run of flat positions [lo, lo + count) of a tensor, of which nothing is gone.
  Run run(const Loops& loop, int64_t tensor, int64_t lo, int64_t count, Rooms& rooms) const {
    return {
        grads_[tensor].at(loop, lo - offsets_[tensor], count, rooms.grad.data()),
        nullptr,
        residual_ + lo,
        velocity_ ? velocity_ + lo : nullptr,
        residual_out_ + lo,
        velocity_out_ ? velocity_out_ + lo : nullptr,
        count,
        static_cast<float>(given_.factors[tensor]),
        static_cast<float>(given_.momentum[tensor]),
        0.0f,
        streams_,
        {},
    };
  }

  // Prefetches what the run [lo, lo + count) of a tensor is going to read.
  void ahead(int64_t tensor, int64_t lo, int64_t count) const {
    const auto bytes = static_cast<int64_t>(sizeof(float)) * count;
    grads_[tensor].ahead(lo - offsets_[tensor], count);
    prefetch(residual_ + lo, bytes);
    if (velocity_) prefetch(velocity_ + lo, bytes);
  }

  // Each thread calls this when its runs are done.
  void finish(const Loops& loop) const {
    if (streams_) loop.fence();
  }

 private:
  at::IntArrayRef offsets_;
  std::vector<Entries> grads_;
  const Accumulation& given_;
  const float* residual_;
  const float* velocity_;
  float* residual_out_;
  float* velocity_out_;
  bool streams_;
  Leaving leaving_;
};

}  // namespace ringprune
