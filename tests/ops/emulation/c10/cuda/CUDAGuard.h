// Stands in for torch's own, see cuda_on_cpu.h. It is included after torch/library.h: the kernels are registered for
// the tensors there are.

#pragma once

#include <c10/core/Device.h>
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, key, m) _TORCH_LIBRARY_IMPL(ns, CPU, m, C10_UID)

namespace c10::cuda {

struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard(Device) {}
};

}  // namespace c10::cuda
