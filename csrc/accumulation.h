// What accumulate and accumulate_select share on every device: their arguments, and the checks of them.

#pragma once

#include <ATen/core/List.h>

#include <string>

#include "checks.h"
#include "tensors.h"

namespace ringprune {

// What has been sent of a state since it was written: a pass reads the state as if it had left.
struct Sent {
  const std::optional<at::Tensor>& indices;
  const std::optional<at::Tensor>& rest;
  bool masks;  // velocities leave as well, but in tensors that were sent whole

  // All but the values of the indices.
  void check(const char* op, int64_t numel, at::Device device) const {
    TORCH_CHECK_VALUE(indices || !rest, "ringprune::", op,
                      ": rest is what is left where something was sent; sent is None");
    if (!indices) return;
    check_indices_tensor(op, *indices, numel, device, "sent");
    if (rest) check_flat({op, "rest"}, *rest, at::kFloat, indices->numel(), device);
  }

  // For the CPU: it can read them without waiting.
  void check_values(const char* op, int64_t numel) const {
    if (indices) check_indices(op, *indices, numel, "sent");
  }
};

// The arguments of one call; it holds no tensor of its own and must not outlive the call.
struct Accumulation {
  const char* op;
  at::TensorList grads;
  const at::Tensor& residual;
  const std::optional<at::Tensor>& velocity;
  const at::Tensor& residual_out;
  const std::optional<at::Tensor>& velocity_out;
  at::ArrayRef<double> factors;
  at::ArrayRef<double> momentum;
  const c10::List<bool>& nesterov;
  Sent sent;

  // Checks everything the passes rely on; returns where each tensor starts.
  std::vector<int64_t> check() const {
    const at::Device device = residual.device();
    std::vector<int64_t> offsets = offsets_of(op, "grads", grads, device);
    const int64_t numel = offsets.back();
    check_dtypes(op, "grads", grads);
    check_flat({op, "residual"}, residual, at::kFloat, numel, device);
    check_flat({op, "residual_out"}, residual_out, at::kFloat, numel, device);
    TORCH_CHECK_VALUE(velocity.has_value() == velocity_out.has_value(), "ringprune::", op,
                      ": velocity and velocity_out must both be tensors or both be None");
    if (velocity) {
      check_flat({op, "velocity"}, *velocity, at::kFloat, numel, device);
      check_flat({op, "velocity_out"}, *velocity_out, at::kFloat, numel, device);
    }
    check_numbers({op, "factors"}, factors, grads.size());
    check_numbers({op, "momentum"}, momentum, grads.size());
    check_length({op, "nesterov"}, nesterov.size(), grads.size());
    sent.check(op, numel, device);
    check_overlaps();
    return offsets;
  }

  // Tells autograd what was written.
  void mark() const {
    mark_written(residual_out);
    if (velocity_out) mark_written(*velocity_out);
  }

 private:
  // What is written shares no memory with anything but the tensor it may replace.
  void check_overlaps() const {
    const auto check = [&](const char* name, const at::Tensor& written, const char* other_name, const at::Tensor& other,
                           int64_t position = -1) {
      check_overlap({op, name}, written, {op, other_name, position}, other);
    };
    const auto check_apart = [&](const char* name, const std::optional<at::Tensor>& tensor) {
      if (!tensor) return;
      check("residual_out", residual_out, name, *tensor);
      if (velocity_out) check("velocity_out", *velocity_out, name, *tensor);
    };
    const auto is = [](const at::Tensor& a, const at::Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); };
    if (!is(residual_out, residual)) check("residual_out", residual_out, "residual", residual);
    if (velocity) {
      if (!is(*velocity_out, *velocity)) check("velocity_out", *velocity_out, "velocity", *velocity);
      check("residual_out", residual_out, "velocity", *velocity);
      check("residual_out", residual_out, "velocity_out", *velocity_out);
      check("velocity_out", *velocity_out, "residual", residual);
    }
    check_apart("sent", sent.indices);
    check_apart("rest", sent.rest);
    for (size_t i = 0; i < grads.size(); ++i) {
      check("residual_out", residual_out, "grads", grads[i], static_cast<int64_t>(i));
      if (velocity) check("velocity_out", *velocity_out, "grads", grads[i], static_cast<int64_t>(i));
    }
  }
};

// What accumulate_select takes besides.
struct Selection {
  at::TensorList weights;
  std::string_view score;
  at::ArrayRef<double> parameters;
  at::IntArrayRef counts;
  const at::Tensor& hints;
  const at::Tensor& tally;

  // Checks them against what is accumulated; returns where each tensor's positions start.
  std::vector<int64_t> check(const Accumulation& accumulation, at::IntArrayRef offsets) const {
    const char* op = accumulation.op;
    const at::Device device = accumulation.residual.device();
    const auto tensors = static_cast<int64_t>(offsets.size()) - 1;
    check_positions(op, offsets.back());
    const std::vector<int64_t> weight_offsets = offsets_of(op, "weights", weights, device);
    TORCH_CHECK_VALUE(at::IntArrayRef(weight_offsets) == offsets, "ringprune::", op,
                      ": weights have other sizes than grads; as many entries each are needed");
    check_dtypes(op, "weights", weights);
    check_numbers({op, "parameters"}, parameters, tensors, 0.0);
    check_dense({op, "hints"}, hints, device);
    check_flat({op, "hints"}, hints.view(-1), at::kInt, 2 * tensors, device);
    check_flat({op, "tally"}, tally, at::kLong, 4, device);
    check_apart_from({op, "hints"}, hints, accumulation);
    check_apart_from({op, "tally"}, tally, accumulation);
    check_overlap({op, "hints"}, hints, {op, "tally"}, tally);
    for (int64_t i = 0; i < tensors; ++i) {
      check_overlap({op, "residual_out"}, accumulation.residual_out, {op, "weights", i}, weights[i]);
      if (accumulation.velocity_out) {
        check_overlap({op, "velocity_out"}, *accumulation.velocity_out, {op, "weights", i}, weights[i]);
      }
    }
    return check_counts(op, counts, offsets);
  }

 private:
  // What is remembered shares no memory with what is computed with.
  void check_apart_from(const Name& name, const at::Tensor& written, const Accumulation& given) const {
    check_overlap(name, written, {name.op, "residual"}, given.residual);
    check_overlap(name, written, {name.op, "residual_out"}, given.residual_out);
    if (given.velocity) check_overlap(name, written, {name.op, "velocity"}, *given.velocity);
    if (given.velocity_out) check_overlap(name, written, {name.op, "velocity_out"}, *given.velocity_out);
    for (size_t i = 0; i < weights.size(); ++i) {
      check_overlap(name, written, {name.op, "grads", static_cast<int64_t>(i)}, given.grads[i]);
      check_overlap(name, written, {name.op, "weights", static_cast<int64_t>(i)}, weights[i]);
    }
  }
};

}  // namespace ringprune
