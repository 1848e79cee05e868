// importance on the CPU: one score per entry of the residual, from the entry, its weight and its tensor's parameter.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../bucket.h"

namespace ringprune {
namespace {

constexpr const char* kImportance = "importance";

at::Tensor importance(const at::Tensor& residual, at::TensorList weights, std::string_view score,
                      at::ArrayRef<double> parameters) {
  const std::vector<int64_t> offsets = offsets_of(kImportance, "weights", weights);
  check_dtypes(kImportance, "weights", weights);
  check_flat({kImportance, "residual"}, residual, at::kFloat, offsets.back());
  check_numbers({kImportance, "parameters"}, parameters, weights.size(), 0.0);
  const Loops& loop = loops();
  const auto score_run = loop.scores[with_score(kImportance, score, [](auto kind) { return number_of(kind); })];

  at::Tensor scores = at::empty_like(residual);
  // The loops only read it: the residual is an output where they also accumulate.
  auto* from = const_cast<float*>(residual.const_data_ptr<float>());
  float* to = scores.mutable_data_ptr<float>();
  const std::vector<Entries> entries = entries_of(weights);
  at::parallel_for(0, offsets.back(), kGrain, [&](int64_t begin, int64_t end) {
    std::array<float, kBlock> room;
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      Run run{};
      run.parameter = static_cast<float>(parameters[tensor]);
      for (int64_t at = lo; at < hi; at += kBlock) {
        run.count = std::min(kBlock, hi - at);
        run.weight = entries[tensor].at(loop, at - offsets[tensor], run.count, room.data());
        run.residual_out = from + at;
        score_run(run, to + at);
      }
    });
  });
  return scores;
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("importance", importance); }

}  // namespace ringprune
