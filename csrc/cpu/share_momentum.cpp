// share_momentum on the CPU: an optimizer's momentum becomes the speed of all ranks.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../shared_momentum.h"
#include "bucket.h"

namespace ringprune {
namespace {

// Calls body(momenta) for entries [start, start + count) of a tensor as float32; what it has changed is written back.
template <class Body>
void change(const Loops& loop, const at::Tensor& tensor, int64_t start, int64_t count, const Body& body) {
  with_dtype({SharedMomentum::kOp, "momenta"}, tensor, [&](auto zero) {
    using scalar_t = decltype(zero);
    scalar_t* place = tensor.mutable_data_ptr<scalar_t>() + start;
    if constexpr (std::is_same_v<scalar_t, float>) {
      body(place);
    } else {
      std::array<float, kBlock> room;
      (tensor.scalar_type() == at::kHalf ? loop.widen_half : loop.widen_bfloat16)(place, count, room.data());
      body(room.data());
      for (int64_t i = 0; i < count; ++i) place[i] = static_cast<scalar_t>(room[i]);
    }
  });
}

void share_momentum(at::TensorList averages, at::TensorList elapsed, at::TensorList momenta, at::TensorList weights,
                    at::TensorList owns, at::ArrayRef<double> intervals, at::ArrayRef<double> times,
                    at::ArrayRef<double> keeps, const c10::List<bool>& whole, at::TensorList squares,
                    at::ArrayRef<double> decays, at::ArrayRef<double> roots, at::ArrayRef<double> epsilons,
                    at::ArrayRef<double> factors) {
  const SharedMomentum given{averages, elapsed, momenta, weights, owns,  intervals, times,
                             keeps,    whole,   squares, decays,  roots, epsilons,  factors};
  const std::vector<int64_t> offsets = given.check();
  const bool is_adam = given.is_adam();
  const std::vector<Entries> square = entries_of(squares);
  const Loops& loop = loops();
  at::parallel_for(0, offsets.back(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const float* average = averages[tensor].const_data_ptr<float>();
      const float* weight = weights[tensor].const_data_ptr<float>();
      const float* own = owns[tensor].const_data_ptr<float>();
      float* time = elapsed[tensor].mutable_data_ptr<float>();
      const Pace pace = given.pace(tensor);
      for_each_block(lo - offsets[tensor], hi - offsets[tensor], [&](int64_t at, int64_t entries) {
        std::array<float, kBlock> room;
        change(loop, momenta[tensor], at, entries, [&](float* momentum) {
          Shared run{average + at, time + at, momentum, weight + at, own + at, nullptr, entries, pace};
          if (!is_adam) return loop.share_momentum(run);
          run.square = square[tensor].at(loop, at, entries, room.data());
          loop.share_adams_momentum(run);
        });
      });
    });
  });
  given.mark();
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("share_momentum", share_momentum); }

}  // namespace ringprune
