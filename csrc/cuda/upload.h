// Small tables to the device without a copy from host memory: they travel as kernel arguments.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace ringprune::cuda {

// Memory to be set to zero on the way.
struct Zeros {
  void* memory = nullptr;
  int64_t bytes = 0;  // a multiple of 8
};

// Writes `bytes` (a multiple of 16) from the host into `to` on the device, and zeros. One launch for up to 28 KiB;
// the host memory may be gone when this returns. A copy would have to wait, and could not be captured into a graph.
void upload(cudaStream_t stream, const void* from, int64_t bytes, void* to, Zeros first = {}, Zeros second = {},
            Zeros third = {});

}  // namespace ringprune::cuda
