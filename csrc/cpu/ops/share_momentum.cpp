// share_momentum on the CPU: an optimizer's momentum becomes the speed of all ranks.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../../shared_momentum.h"
#include "../bucket.h"

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

void pass(const SharedMomentum& given, at::IntArrayRef offsets) {
  const bool is_adam = given.is_adam();
  const std::vector<Entries> square = entries_of(given.squares);
  const Loops& loop = loops();
  at::parallel_for(0, offsets.back(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const float* average = given.averages[tensor].const_data_ptr<float>();
      const float* weight = given.weights[tensor].const_data_ptr<float>();
      const float* own = given.owns[tensor].const_data_ptr<float>();
      float* time = given.elapsed[tensor].mutable_data_ptr<float>();
      const Pace pace = given.pace(tensor);
      for_each_block(lo - offsets[tensor], hi - offsets[tensor], [&](int64_t at, int64_t entries) {
        std::array<float, kBlock> room;
        change(loop, given.momenta[tensor], at, entries, [&](float* momentum) {
          Shared run{average + at, time + at, momentum, weight + at, own + at, nullptr, entries, pace};
          if (!is_adam) return loop.share_momentum(run);
          run.square = square[tensor].at(loop, at, entries, room.data());
          loop.share_adams_momentum(run);
        });
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("share_momentum", share_momentum<pass>); }

}  // namespace ringprune
