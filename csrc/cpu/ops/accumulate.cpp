// accumulate on the CPU: residual and velocity take up the gradients of many tensors.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../bucket.h"

namespace ringprune {
namespace {

at::Tensor accumulate(at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity,
                      const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out,
                      at::ArrayRef<double> factors, at::ArrayRef<double> momentum, const c10::List<bool>& nesterov,
                      const std::optional<at::Tensor>& sent, const std::optional<at::Tensor>& rest, bool masks) {
  const Accumulation given{"accumulate", grads,   residual, velocity, residual_out,
                           velocity_out, factors, momentum, nesterov, {sent, rest, masks}};
  const std::vector<int64_t> offsets = given.check();
  given.sent.check_values(given.op, offsets.back());
  const Bucket bucket(given, offsets);
  at::Tensor nonfinite = at::zeros({static_cast<int64_t>(grads.size())}, at::kLong);
  int64_t* found = nonfinite.mutable_data_ptr<int64_t>();
  const Loops& loop = loops();
  at::parallel_for(0, offsets.back(), kGrain, [&](int64_t begin, int64_t end) {
    Rooms rooms;
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const auto accumulate_run = loop.accumulate[bucket.correction(tensor)];
      int64_t count = 0;
      const int32_t* next = bucket.leaving().from(lo);
      for_each_block(lo, hi, [&](int64_t at, int64_t entries) {
        Run run = bucket.run(loop, tensor, at, entries, rooms);
        bucket.leaving().note(run.gone, tensor, at, entries, next);
        count += accumulate_run(run);
      });
      if (count) std::atomic_ref(found[tensor]) += count;
    });
    bucket.finish(loop);
  });
  given.mark();
  return nonfinite;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("accumulate", accumulate); }

}  // namespace ringprune
