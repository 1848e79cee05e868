// The upload of small tables: one kernel that writes its own arguments to memory.

#include <algorithm>
#include <cstring>

#include "launch.h"
#include "upload.h"

namespace ringprune::cuda {
namespace {

static_assert(CUDART_VERSION >= 12010, "kernel arguments of more than 4 KiB need CUDA 12.1");

constexpr int kSmall = 3 * 1024 / 16;  // most buckets; the arguments are copied with every launch
constexpr int kLarge = 28 * 1024 / 16;

template <int kWords>
struct Words {
  uint4 words[kWords];
};

__device__ void clear(const Zeros& zeros, int64_t begin, int64_t step) {
  for (int64_t i = begin; i < zeros.bytes / 8; i += step) static_cast<uint64_t*>(zeros.memory)[i] = 0;
}

template <int kWords>
__global__ void write(const __grid_constant__ Words<kWords> table, int words, uint4* to, Zeros first, Zeros second,
                      Zeros third) {
  wait_for_previous();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = begin; i < words; i += step) to[i] = table.words[i];
  clear(first, begin, step);
  clear(second, begin, step);
  clear(third, begin, step);
}

template <int kWords>
void launch_write(cudaStream_t stream, const char* from, int words, uint4* to, Zeros first, Zeros second, Zeros third) {
  Words<kWords> table;
  if (words > 0) std::memcpy(table.words, from, sizeof(uint4) * words);
  std::memset(static_cast<void*>(table.words + words), 0, sizeof(uint4) * (kWords - words));
  const int64_t most = std::max({int64_t{words}, first.bytes / 8, second.bytes / 8, third.bytes / 8});
  const int64_t blocks = std::min<int64_t>(ceil_div<int64_t>(most, kThreads), 1024);
  launch(stream, blocks, write<kWords>, table, words, to, first, second, third);
}

}  // namespace

void upload(cudaStream_t stream, const void* from, int64_t bytes, void* to, Zeros first, Zeros second, Zeros third) {
  const char* source = static_cast<const char*>(from);
  auto* target = static_cast<uint4*>(to);
  int64_t left = bytes / 16;
  do {
    const int words = static_cast<int>(std::min<int64_t>(left, kLarge));
    const auto write_some = words <= kSmall ? launch_write<kSmall> : launch_write<kLarge>;
    write_some(stream, source, words, target, first, second, third);
    first = second = third = {};  // once is enough
    source += sizeof(uint4) * words;
    target += words;
    left -= words;
  } while (left > 0);
}

}  // namespace ringprune::cuda
