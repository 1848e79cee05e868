// take on CUDA: the values to be sent leave the residual. One launch, a thread an index.

#include "kernels.h"
#include "launch.h"
#include "marks.cuh"

namespace ringprune::cuda {
namespace {

// Whether the tensor of indices.memory[j] is covered completely.
__device__ bool is_whole(const int64_t* offsets, int32_t tensors, const Indices& indices, int64_t j) {
  const int64_t index = indices.memory[j];
  int32_t low = 0, high = tensors;  // the last tensor that starts at or before the index
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (offsets[middle] <= index ? low : high) = middle;
  }
  return covers(indices, j, offsets[low], offsets[low + 1] - offsets[low]);
}

__global__ void __launch_bounds__(kThreads) take_entries(const int64_t* offsets, int32_t tensors, Indices indices,
                                                         float* residual, float* velocity, float* values) {
  wait_for_previous();
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= indices.count) return;
  const int64_t index = indices.memory[j];
  if (index < 0 || index >= indices.numel) {
    values[j] = 0.0f;
    return;
  }
  values[j] = residual[index];
  residual[index] = 0.0f;
  if (velocity && !is_whole(offsets, tensors, indices, j)) velocity[index] = 0.0f;
}

}  // namespace

void launch_take(cudaStream_t stream, const int64_t* offsets, int32_t tensors, const Indices& indices, float* residual,
                 float* velocity, float* values) {
  launch(stream, ceil_div<int64_t>(indices.count, kThreads), take_entries, offsets, tensors, indices, residual,
         velocity, values);
}

}  // namespace ringprune::cuda
