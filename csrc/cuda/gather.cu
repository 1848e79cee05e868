// gather on CUDA: the values to be sent, which stay where they are. One launch, a thread an index.

#include "kernels.h"
#include "launch.h"

namespace ringprune::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) read_entries(Indices indices, const float* residual, float* values) {
  wait_for_previous();
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= indices.count) return;
  const int64_t index = indices.memory[j];
  values[j] = index >= 0 && index < indices.numel ? residual[index] : 0.0f;
}

}  // namespace

void launch_gather(cudaStream_t stream, const Indices& indices, const float* residual, float* values) {
  launch(stream, ceil_div<int64_t>(indices.count, kThreads), read_entries, indices, residual, values);
}

}  // namespace ringprune::cuda
