// accumulate_select on the CPU: one pass that accumulates, scores and collects candidates, then the exact selection.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <tuple>

#include "../bucket.h"
#include "../selector.h"

namespace ringprune {
namespace {

constexpr const char* kAccumulateSelect = "accumulate_select";

// What one pass reads and writes.
class Pass {
 public:
  Pass(const Accumulation& given, const Selection& selection, at::IntArrayRef offsets)
      : bucket_(given, offsets),
        offsets_(offsets),
        weights_(entries_of(selection.weights)),
        parameters_(selection.parameters),
        prefetches_(offsets.back() >= kStreamed),
        score_(with_score(kAccumulateSelect, selection.score, [](auto kind) { return number_of(kind); })) {}

  // Accumulates a part and hands its keys on; returns how many of its gradients are NaN or infinite.
  int64_t accumulate(Part& part) const {
    const Loops& loop = loops();
    const auto accumulate_keys = loop.accumulate_keys[bucket_.correction(part.tensor)][score_];
    alignas(64) std::array<uint32_t, kBlock> keys;
    Rooms rooms;
    int64_t nonfinite = 0;
    const int32_t* next = bucket_.leaving().from(part.lo);
    for_each_block(part.lo, part.hi, [&](int64_t lo, int64_t count) {
      Run block = run(part.tensor, lo, count, rooms);
      bucket_.leaving().note(block.gone, part.tensor, lo, count, next);
      nonfinite += accumulate_keys(block, keys.data());
      if (prefetches_) ahead(part.tensor, lo + count, std::min(kBlock, part.hi - lo - count));
      part.add(loop, keys.data(), count, lo);
    });
    bucket_.finish(loop);
    return nonfinite;
  }

  // The keys that accumulate() is going to find; nothing is written but them.
  void look_ahead(int64_t tensor, int64_t lo, int64_t count, uint32_t* keys) const {
    const int32_t* next = bucket_.leaving().from(lo);
    Rooms rooms;
    std::array<float, kBlock> residual;
    std::array<float, kBlock> velocity;
    Run ahead = run(tensor, lo, count, rooms);
    bucket_.leaving().note(ahead.gone, tensor, lo, count, next);
    ahead.residual_out = residual.data();
    ahead.velocity_out = velocity.data();
    ahead.streams = false;
    loops().accumulate_keys[bucket_.correction(tensor)][score_](ahead, keys);
  }

  // The keys that accumulate() has found.
  void look_back(int64_t tensor, int64_t lo, int64_t count, uint32_t* keys) const {
    Rooms rooms;
    loops().keys[score_](run(tensor, lo, count, rooms), keys);
  }

 private:
  // The memory would be idle while candidates are collected: a block is short, and nothing else reads ahead so far.
  void ahead(int64_t tensor, int64_t lo, int64_t count) const {
    bucket_.ahead(tensor, lo, count);
    weights_[tensor].ahead(lo - offsets_[tensor], count);
  }

  Run run(int64_t tensor, int64_t lo, int64_t count, Rooms& rooms) const {
    const Loops& loop = loops();
    Run run = bucket_.run(loop, tensor, lo, count, rooms);
    run.weight = weights_[tensor].at(loop, lo - offsets_[tensor], count, rooms.weight.data());
    run.parameter = static_cast<float>(parameters_[tensor]);
    return run;
  }

  Bucket bucket_;
  at::IntArrayRef offsets_;
  std::vector<Entries> weights_;
  at::ArrayRef<double> parameters_;
  bool prefetches_;  // a bucket that fits into the caches is there already
  ScoreNumber score_;
};

std::tuple<at::Tensor, at::Tensor> accumulate_select(
    at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity, at::TensorList weights,
    const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out, at::ArrayRef<double> factors,
    at::ArrayRef<double> momentum, const c10::List<bool>& nesterov, std::string_view score,
    at::ArrayRef<double> parameters, at::IntArrayRef counts, const at::Tensor& hints, const at::Tensor& tally,
    const std::optional<at::Tensor>& sent, const std::optional<at::Tensor>& rest, bool masks) {
  const Accumulation given{kAccumulateSelect, grads,   residual, velocity, residual_out,
                           velocity_out,      factors, momentum, nesterov, {sent, rest, masks}};
  const Selection selection{weights, score, parameters, counts, hints, tally};
  const std::vector<int64_t> offsets = given.check();
  const std::vector<int64_t> starts = selection.check(given, offsets);
  given.sent.check_values(given.op, offsets.back());
  const Pass pass(given, selection, offsets);

  at::Tensor positions = at::empty({starts.back()}, at::kInt);
  at::Tensor nonfinite = at::zeros({static_cast<int64_t>(grads.size())}, at::kLong);
  int64_t* found = nonfinite.mutable_data_ptr<int64_t>();
  auto* kept = reinterpret_cast<Hint*>(hints.mutable_data_ptr<int32_t>());
  Selector selector(offsets, counts, starts, {kept, grads.size()});
  selector.warm([&](auto... block) { pass.look_ahead(block...); });
  selector.collect([&](Part& part) {
    if (const int64_t count = pass.accumulate(part)) std::atomic_ref(found[part.tensor]) += count;
  });
  selector.finish([&](auto... block) { pass.look_back(block...); }, positions.mutable_data_ptr<int32_t>());

  std::copy(selector.hints().begin(), selector.hints().end(), kept);
  auto* counted = tally.mutable_data_ptr<int64_t>();
  for (const int64_t more : selector.tally().in_order()) *counted++ += more;
  given.mark();
  mark_written(hints);
  mark_written(tally);
  return {positions, nonfinite};
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("accumulate_select", accumulate_select); }

}  // namespace ringprune
