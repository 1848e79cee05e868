// What share_momentum takes on every device, and the checks of it (ringprune/ops/share_momentum.py).

#pragma once

#include <ATen/core/List.h>

#include <array>

#include "checks.h"
#include "tensors.h"

namespace ringprune {

// The arguments of one call; it holds no tensor of its own and must not outlive the call.
struct SharedMomentum {
  at::TensorList averages;
  at::TensorList elapsed;
  at::TensorList momenta;
  at::TensorList weights;
  at::TensorList owns;
  at::ArrayRef<double> intervals;
  at::ArrayRef<double> times;
  at::ArrayRef<double> keeps;
  const c10::List<bool>& whole;
  at::TensorList squares;  // from here on nothing for SGD
  at::ArrayRef<double> decays;
  at::ArrayRef<double> roots;
  at::ArrayRef<double> epsilons;
  at::ArrayRef<double> factors;

  static constexpr const char* kOp = "share_momentum";

  bool is_adam() const { return !squares.empty(); }

  // The numbers that one tensor's entries have in common.
  Pace pace(size_t i) const {
    Pace pace{static_cast<float>(intervals[i]), static_cast<float>(times[i]), static_cast<float>(keeps[i]),
              whole.get(i)};
    if (!is_adam()) return pace;
    pace.decay = static_cast<float>(decays[i]);
    pace.root = static_cast<float>(roots[i]);
    pace.epsilon = static_cast<float>(epsilons[i]);
    pace.factor = static_cast<float>(factors[i]);
    return pace;
  }

  // Checks everything the passes rely on; returns where each tensor starts.
  std::vector<int64_t> check() const {
    TORCH_CHECK_VALUE(!averages.empty(), "ringprune::share_momentum: no tensors");
    const at::Device device = averages[0].device();
    std::vector<int64_t> offsets = offsets_of(kOp, "averages", averages, device);
    const size_t tensors = averages.size(), adams = is_adam() ? tensors : 0;
    check_floats("averages", averages);
    check_sizes("elapsed", elapsed, tensors, device);
    check_floats("elapsed", elapsed);
    check_sizes("momenta", momenta, tensors, device);
    check_dtypes(kOp, "momenta", momenta);
    check_sizes("weights", weights, tensors, device);
    check_floats("weights", weights);
    check_sizes("owns", owns, tensors, device);
    check_floats("owns", owns);
    check_sizes("squares", squares, adams, device);
    check_dtypes(kOp, "squares", squares);
    check_numbers({kOp, "intervals"}, intervals, tensors);
    check_numbers({kOp, "times"}, times, tensors);
    check_numbers({kOp, "keeps"}, keeps, tensors);
    check_length({kOp, "whole"}, whole.size(), tensors);
    check_numbers({kOp, "decays"}, decays, adams);
    check_numbers({kOp, "roots"}, roots, adams, 0.0);
    check_numbers({kOp, "epsilons"}, epsilons, adams, 0.0);
    check_numbers({kOp, "factors"}, factors, adams, 0.0);
    check_all_apart();
    return offsets;
  }

  // Tells autograd what was written.
  void mark() const {
    for (const at::Tensor& tensor : elapsed) mark_written(tensor);
    for (const at::Tensor& tensor : momenta) mark_written(tensor);
  }

 private:
  void check_floats(const char* name, at::TensorList tensors) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      TORCH_CHECK_TYPE(tensors[i].scalar_type() == at::kFloat, Name{kOp, name, static_cast<int64_t>(i)}.str(), " is ",
                       tensors[i].scalar_type(), "; Float is needed");
    }
  }

  void check_sizes(const char* name, at::TensorList tensors, size_t length, at::Device device) const {
    check_length({kOp, name}, tensors.size(), length);
    for (size_t i = 0; i < length; ++i) {
      const Name each{kOp, name, static_cast<int64_t>(i)};
      check_dense(each, tensors[i], device);
      TORCH_CHECK_VALUE(tensors[i].numel() == averages[i].numel(), each.str(), " has ", tensors[i].numel(),
                        " entries; ", averages[i].numel(), " are needed");
    }
  }

  // What is written shares no memory with anything.
  void check_all_apart() const {
    struct Place {
      uintptr_t start;
      Name name;
      const at::Tensor* tensor;
      bool written;
    };
    std::vector<Place> places;
    const auto add = [&](const char* name, at::TensorList tensors, bool written) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].numel() == 0) continue;
        const auto start = reinterpret_cast<uintptr_t>(tensors[i].const_data_ptr());
        places.push_back({start, {kOp, name, static_cast<int64_t>(i)}, &tensors[i], written});
      }
    };
    add("elapsed", elapsed, true);
    add("momenta", momenta, true);
    add("averages", averages, false);
    add("weights", weights, false);
    add("owns", owns, false);
    add("squares", squares, false);
    std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.start < b.start; });
    // Of what lies before, whatever ends last; and whatever of that is written ends last.
    const Place *last = nullptr, *last_written = nullptr;
    const auto end_of = [](const Place& place) { return place.start + place.tensor->nbytes(); };
    for (const Place& place : places) {
      const Place* other = place.written ? last : last_written;
      if (other) check_overlap(place.name, *place.tensor, other->name, *other->tensor);
      if (!last || end_of(place) > end_of(*last)) last = &place;
      if (place.written && (!last_written || end_of(place) > end_of(*last_written))) last_written = &place;
    }
  }
};

// The op of a device, whose passes are `pass`.
template <void (*pass)(const SharedMomentum&, at::IntArrayRef offsets)>
void share_momentum(at::TensorList averages, at::TensorList elapsed, at::TensorList momenta, at::TensorList weights,
                    at::TensorList owns, at::ArrayRef<double> intervals, at::ArrayRef<double> times,
                    at::ArrayRef<double> keeps, const c10::List<bool>& whole, at::TensorList squares,
                    at::ArrayRef<double> decays, at::ArrayRef<double> roots, at::ArrayRef<double> epsilons,
                    at::ArrayRef<double> factors) {
  const SharedMomentum given{averages, elapsed, momenta, weights, owns,  intervals, times,
                             keeps,    whole,   squares, decays,  roots, epsilons,  factors};
  pass(given, given.check());
  given.mark();
}

}  // namespace ringprune
