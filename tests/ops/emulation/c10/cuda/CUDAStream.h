// Stands in for torch's own, see cuda_on_cpu.h.

#pragma once

#include <cuda_runtime.h>

namespace c10::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

}  // namespace c10::cuda
