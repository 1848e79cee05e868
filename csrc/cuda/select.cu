// select on CUDA: the exact largest scores of every tensor, ties to the lowest position. Five launches, one for a small
// bucket.

#include "kernels.h"
#include "selection.cuh"

namespace ringprune::cuda {

void launch_select(cudaStream_t stream, const Bucket& bucket, const float* scores) {
  select_collected(stream, bucket, GivenKeys{scores});
}

}  // namespace ringprune::cuda
