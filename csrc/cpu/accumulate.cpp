// accumulate on the CPU: residual and velocity take up the gradients of many tensors.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../arithmetic.h"
#include "../checks.h"
#include "../tensors.h"

namespace ringprune {
namespace {

constexpr const char* kOp = "accumulate";

// The state of one run of entries. The velocities are null for plain error feedback. The outputs may be the inputs:
// every entry is read before it is written.
struct State {
  const float* residual;
  const float* velocity;
  float* residual_out;
  float* velocity_out;
  int64_t count;
};

template <class scalar_t>
void add(const State& state, const scalar_t* grad, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < state.count; ++i) {
    state.residual_out[i] = state.residual[i] + static_cast<float>(grad[i]) * factor;
  }
}

template <bool kNesterov, class scalar_t>
void add_with_momentum(const State& state, const scalar_t* grad, float factor, float momentum) {
#pragma omp simd
  for (int64_t i = 0; i < state.count; ++i) {
    float velocity = state.velocity[i];
    const float change = corrected<kNesterov>(static_cast<float>(grad[i]) * factor, momentum, velocity);
    state.velocity_out[i] = velocity;
    state.residual_out[i] = state.residual[i] + change;
  }
}

// What is written shares no memory with anything but the tensor it may replace.
void check_overlaps(at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity,
                    const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out) {
  const auto check = [](const char* name, const at::Tensor& written, const char* other_name, const at::Tensor& other,
                        int64_t position = -1) {
    check_overlap({kOp, name}, written, {kOp, other_name, position}, other);
  };
  const auto is = [](const at::Tensor& a, const at::Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); };
  if (!is(residual_out, residual)) check("residual_out", residual_out, "residual", residual);
  if (velocity) {
    if (!is(*velocity_out, *velocity)) check("velocity_out", *velocity_out, "velocity", *velocity);
    check("residual_out", residual_out, "velocity", *velocity);
    check("residual_out", residual_out, "velocity_out", *velocity_out);
    check("velocity_out", *velocity_out, "residual", residual);
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    check("residual_out", residual_out, "grads", grads[i], static_cast<int64_t>(i));
    if (velocity) check("velocity_out", *velocity_out, "grads", grads[i], static_cast<int64_t>(i));
  }
}

// Everything the passes rely on; returns where each tensor starts.
std::vector<int64_t> check_all(at::TensorList grads, const at::Tensor& residual,
                               const std::optional<at::Tensor>& velocity, const at::Tensor& residual_out,
                               const std::optional<at::Tensor>& velocity_out, at::ArrayRef<double> factors,
                               at::ArrayRef<double> momentum, const c10::List<bool>& nesterov) {
  std::vector<int64_t> offsets = offsets_of(kOp, "grads", grads);
  const int64_t numel = offsets.back();
  check_dtypes(kOp, "grads", grads);
  check_flat({kOp, "residual"}, residual, at::kFloat, numel);
  check_flat({kOp, "residual_out"}, residual_out, at::kFloat, numel);
  TORCH_CHECK_VALUE(velocity.has_value() == velocity_out.has_value(),
                    "ringprune::accumulate: velocity and velocity_out must both be tensors or both be None");
  if (velocity) {
    check_flat({kOp, "velocity"}, *velocity, at::kFloat, numel);
    check_flat({kOp, "velocity_out"}, *velocity_out, at::kFloat, numel);
  }
  check_length({kOp, "factors"}, factors.size(), grads.size());
  check_length({kOp, "momentum"}, momentum.size(), grads.size());
  check_length({kOp, "nesterov"}, nesterov.size(), grads.size());
  check_overlaps(grads, residual, velocity, residual_out, velocity_out);
  return offsets;
}

void accumulate(at::TensorList grads, const at::Tensor& residual, const std::optional<at::Tensor>& velocity,
                const at::Tensor& residual_out, const std::optional<at::Tensor>& velocity_out,
                at::ArrayRef<double> factors, at::ArrayRef<double> momentum, const c10::List<bool>& nesterov) {
  const std::vector<int64_t> offsets =
      check_all(grads, residual, velocity, residual_out, velocity_out, factors, momentum, nesterov);
  const float* from = residual.const_data_ptr<float>();
  const float* from_velocity = velocity ? velocity->const_data_ptr<float>() : nullptr;
  float* to = residual_out.mutable_data_ptr<float>();
  float* to_velocity = velocity ? velocity_out->mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, offsets.back(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_run(offsets, begin, end, [&](int64_t tensor, int64_t lo, int64_t hi) {
      const State state{from + lo, velocity ? from_velocity + lo : nullptr, to + lo,
                        velocity ? to_velocity + lo : nullptr, hi - lo};
      const auto factor = static_cast<float>(factors[tensor]);
      const auto mass = static_cast<float>(momentum[tensor]);
      with_dtype({kOp, "grads", tensor}, grads[tensor], [&](auto zero) {
        const auto* grad = grads[tensor].const_data_ptr<decltype(zero)>() + (lo - offsets[tensor]);
        if (!velocity) {
          add(state, grad, factor);
        } else if (nesterov.get(tensor)) {
          add_with_momentum<true>(state, grad, factor, mass);
        } else {
          add_with_momentum<false>(state, grad, factor, mass);
        }
      });
    });
  });
  mark_written(residual_out);
  if (velocity_out) mark_written(*velocity_out);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) { m.impl("accumulate", accumulate); }

}  // namespace ringprune
