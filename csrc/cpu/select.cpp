// select on the CPU: the exact largest scores of every tensor.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../checks.h"
#include "selector.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "select";

class Scores final : public KeySource {
 public:
  explicit Scores(const float* scores) : scores_(scores) {}
  void read(int64_t, int64_t lo, int64_t count, uint32_t* keys) const override {
    loops().keys_of(scores_ + lo, count, keys);
  }

 private:
  const float* scores_;
};

at::Tensor select(const at::Tensor& scores, at::IntArrayRef offsets, at::IntArrayRef counts) {
  check_flat({kOp, "scores"}, scores, at::kFloat, scores.numel());
  check_positions(kOp, scores.numel());
  check_offsets(kOp, offsets, scores.numel());
  const std::vector<int64_t> starts = check_counts(kOp, counts, offsets);

  at::Tensor positions = at::empty({starts.back()}, at::kInt);
  const Scores source(scores.const_data_ptr<float>());
  const std::vector<Hint> cold(counts.size());
  Selector selector(offsets, counts, starts, cold);
  selector.warm(source);
  selector.collect([&](Part& part) {
    alignas(64) std::array<uint32_t, kBlock> keys;
    for_each_block(part.lo, part.hi, [&](int64_t lo, int64_t count) {
      source.read(part.tensor, lo, count, keys.data());
      part.add(loops(), keys.data(), count, lo);
    });
  });
  selector.finish(source, positions.mutable_data_ptr<int32_t>());
  return positions;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("select", select); }

}  // namespace ringprune
