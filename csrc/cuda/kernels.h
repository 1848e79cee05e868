// Every op on the device as its host side (csrc/cuda/<op>.cpp) calls it. All memory is on the device, all arguments
// have been checked; what is said to be zero is zeroed by the upload of the table.

#pragma once

#include <cuda_runtime.h>

#include "parts.h"
#include "selection.h"

namespace ringprune::cuda {

// Positions of entries, at most INT32_MAX; those outside of [0, numel) are passed over.
struct Indices {
  const int32_t* memory;
  int64_t count;
  int64_t numel;
};

// What was sent of a state since it was written: it is read as `rest` there, 0 where that is null, and where it `masks`
// velocities as 0, but in tensors sent whole.
struct Leaving {
  Indices indices;  // null memory: nothing was
  const float* rest;
  bool masks;
};

// The flat state of a bucket. The velocities are null for plain error feedback. The outputs may be the inputs: every
// entry is read before it is written, by the same thread.
struct State {
  const float* residual;
  const float* velocity;
  float* residual_out;
  float* velocity_out;
  Leaving leaving;
};

// Adds to `nonfinite`, zero before, how many entries of each gradient are not finite.
void launch_accumulate(cudaStream_t stream, const Parts& parts, const State& state, int64_t* nonfinite);

template <class Score>
void launch_accumulate_select(cudaStream_t stream, const Bucket& bucket, const State& state, int64_t* nonfinite);

// `counts` are zero before.
void launch_count_nonfinite(cudaStream_t stream, const Parts& parts, int64_t* counts);

// The body of a message of that many values (books.h) begins on a word; the rest may be the values.
void launch_decode_books(cudaStream_t stream, const uint8_t* body, int64_t numel, int64_t levels, bool add,
                         float* values);
void launch_encode_books(cudaStream_t stream, const float* values, int64_t numel, int64_t levels, float* rest,
                         uint8_t* body);

void launch_gather(cudaStream_t stream, const Indices& indices, const float* residual, float* values);

void launch_give_back(cudaStream_t stream, const Indices& indices, const float* values, float* residual);

template <class Score>
void launch_importance(cudaStream_t stream, const Parts& parts, const float* residual, float* scores);

void launch_select(cudaStream_t stream, const Bucket& bucket, const float* scores);

void launch_put(cudaStream_t stream, const Table<Output>& outputs, const Indices& indices, const float* values);

// As Adam has it where `is_adam`, else as SGD.
void launch_share_momentum(cudaStream_t stream, const Table<Sharing>& tensors, bool is_adam);

// Tiles of the parts are kSumTile entries here, and `first_slot` counts in `sums_of_tiles`: one for each tile of the
// bucket, then sums of kSumTile of these, and so on, for each tensor.
constexpr int kSumTile = 2048;
void launch_square_sum(cudaStream_t stream, const Parts& parts, double* sums_of_tiles, double* sums);

// `offsets`, where each of the tensors starts and the last ends, is only looked at with velocity, which may be null.
void launch_take(cudaStream_t stream, const int64_t* offsets, int32_t tensors, const Indices& indices, float* residual,
                 float* velocity, float* values);

}  // namespace ringprune::cuda
