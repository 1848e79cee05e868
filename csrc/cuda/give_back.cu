// give_back on CUDA: what rounding dropped goes back into the residual. One launch, a thread an index.

#include "kernels.h"
#include "launch.h"

namespace ringprune::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) write_entries(Indices indices, const float* values, float* residual) {
  wait_for_previous();
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= indices.count) return;
  const int64_t index = indices.memory[j];
  if (index >= 0 && index < indices.numel) residual[index] = values[j];
}

}  // namespace

void launch_give_back(cudaStream_t stream, const Indices& indices, const float* values, float* residual) {
  launch(stream, ceil_div<int64_t>(indices.count, kThreads), write_entries, indices, values, residual);
}

}  // namespace ringprune::cuda
