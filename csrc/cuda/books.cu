// encode_books and decode_books on CUDA: a block a book, eight neighbours a thread. One launch.
//
// Fitting a book is a walk along its bins and levels that one thread makes, while other blocks of the multiprocessor
// read and write.

#include "../books.h"
#include "entries.cuh"
#include "kernels.h"
#include "warp.cuh"

namespace ringprune::cuda {
namespace {

using namespace books;

constexpr int kEach = kBookValues / kThreads;
static_assert(kEach == 8);
constexpr int kBinsEach = 2;
static_assert(kBinsEach * kThreads >= kBookBins);

__device__ constexpr auto kRootsOfCounts = roots_of_counts();
__device__ constexpr auto kRootsOfWidths = roots_of_widths();

struct Room {
  unsigned long long held[kBookBins];  // the histogram
  Bins bins;
  uint8_t code_of[kBookBins];
  float level_of[kBookBins];
  uint32_t largest;
  uint16_t book[kMostLevels];
};

// A thread's values, of which `valid` are there; the others are zero.
struct Values {
  float v[kEach];
  int64_t first;
  int64_t valid;

  __device__ Values(const float* values, int64_t numel)
      : first(static_cast<int64_t>(blockIdx.x) * kBookValues + kEach * threadIdx.x), valid(numel - first) {
    const Quad<float> low = load4(values + first, valid), high = load4(values + first + 4, valid - 4);
#pragma unroll
    for (int e = 0; e < kEach; ++e) v[e] = e < 4 ? low.v[e] : high.v[e - 4];
  }

  __device__ void store(float* to) const {
    Quad<float> low, high;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      low.v[e] = v[e];
      high.v[e] = v[e + 4];
    }
    store4(to + first, valid, low);
    store4(to + first + 4, valid - 4, high);
  }
};

// The largest magnitude of all threads' values.
__device__ uint32_t find_largest(const Values& values, Room& room) {
  uint32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) largest = max(largest, bits_of(values.v[e]) & kMagnitudeBits);
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  if (lane() == 0) atomicMax(&room.largest, largest);
  __syncthreads();
  return room.largest;
}

// What is known of each bin: two neighbours a thread.
__device__ void resolve(int32_t base, Room& room) {
  int32_t counts[kBinsEach], counted = 0;
  int64_t sums[kBinsEach], roots[kBinsEach], summed = 0, reached = 0;
  const int first = kBinsEach * static_cast<int>(threadIdx.x);
#pragma unroll
  for (int e = 0; e < kBinsEach; ++e) {
    const int b = first + e;
    const auto held = b < kBookBins ? static_cast<int64_t>(room.held[b]) : 0;
    counts[e] = static_cast<int32_t>(held >> 32);
    sums[e] = b < kBookBins ? sum_of(b, held, base) : 0;
    roots[e] = b < kBookBins ? int64_t{kRootsOfCounts[counts[e]]} * kRootsOfWidths[b] : 0;
    counted += counts[e];
    summed += sums[e];
    reached += roots[e];
  }
  int32_t all;
  int64_t whole;
  counted = block_scan(counted, all);
  summed = block_scan(summed, whole);
  __syncthreads();
  reached = block_scan(reached, whole);
#pragma unroll
  for (int e = 0; e < kBinsEach; ++e) {
    const int b = first + e;
    reached += roots[e];
    if (b < kBookBins) {
      room.bins.count[b] = counts[e];
      room.bins.mean[b] = mean_of(sums[e], counts[e]);
      room.bins.reached[b] = reached;
    }
    if (b <= kBookBins) {
      room.bins.counted[b] = counted;
      room.bins.summed[b] = summed;
    }
    counted += counts[e];
    summed += sums[e];
  }
  __syncthreads();
}

// Joins a thread's codes; the body has room for whole words of them.
__device__ void store_codes(const uint32_t* codes, int64_t first, int64_t numel, int levels, uint8_t* to) {
  const int bits = bits_per_code(levels);
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) word |= codes[e] << (e * bits);
  const int64_t offset = first * bits / 8;
  if (offset >= code_bytes(numel, levels)) return;
  if (bits == 4) {
    *reinterpret_cast<uint32_t*>(to + offset) = word;
  } else {
    *reinterpret_cast<uint16_t*>(to + offset) = static_cast<uint16_t>(word);
  }
}

__global__ void __launch_bounds__(kThreads)
    encode_blocks(const float* from, int64_t numel, int levels, float* rest, uint16_t* books, uint8_t* codes) {
  wait_for_previous();
  __shared__ Room room;
  for (int b = threadIdx.x; b < kBookBins; b += kThreads) room.held[b] = 0;
  if (threadIdx.x == 0) room.largest = 0;
  Values values(from, numel);
  __syncthreads();
  const uint32_t largest = find_largest(values, room);
  const int32_t base = base_of(largest);
  const bool is_nan = largest >= kInfinity, is_fitted = !is_nan && !is_too_small(base);
  if (is_fitted) {  // as all threads find
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (e >= values.valid) break;
      const uint32_t bits = bits_of(values.v[e]);
      atomicAdd(&room.held[bin_of(bits, base)], static_cast<unsigned long long>(kOne + (bits & kBelow)));
    }
    __syncthreads();
    resolve(base, room);
    if (threadIdx.x == 0) fit(room.bins, base, levels, room.book, room.code_of, room.level_of);
    __syncthreads();
  }
  uint32_t code[kEach] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (is_fitted && e < values.valid) {
      const int bin = bin_of(bits_of(values.v[e]), base);
      code[e] = room.code_of[bin];
      values.v[e] -= room.level_of[bin];
    } else if (is_nan) {
      values.v[e] = float_of(uint32_t{kNaN} << 16);
    }
  }
  if (static_cast<int>(threadIdx.x) < levels) {
    books[int64_t{blockIdx.x} * levels + threadIdx.x] = is_fitted ? room.book[threadIdx.x]
                                                        : is_nan  ? kNaN
                                                                  : uint16_t{0};
  }
  store_codes(code, values.first, numel, levels, codes);
  values.store(rest);
}

template <bool kAdd>
__global__ void __launch_bounds__(kThreads)
    decode_blocks(const uint16_t* books, const uint8_t* codes, int64_t numel, int levels, float* to) {
  wait_for_previous();
  __shared__ float level[kMostLevels];
  if (static_cast<int>(threadIdx.x) < levels) {
    level[threadIdx.x] = float_of(uint32_t{books[int64_t{blockIdx.x} * levels + threadIdx.x]} << 16);
  }
  __syncthreads();
  const int bits = bits_per_code(levels);
  const int64_t first = int64_t{blockIdx.x} * kBookValues + kEach * threadIdx.x, offset = first * bits / 8;
  if (first >= numel) return;
  const uint32_t word = bits == 4 ? *reinterpret_cast<const uint32_t*>(codes + offset)
                                  : *reinterpret_cast<const uint16_t*>(codes + offset);
#pragma unroll
  for (int half = 0; half < kEach; half += 4) {
    const int64_t valid = numel - first - half;
    Quad<float> quad{};
    if (kAdd) quad = load4(to + first + half, valid);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float found = level[word >> ((half + e) * bits) & (levels - 1)];
      quad.v[e] = kAdd ? quad.v[e] + found : found;
    }
    store4(to + first + half, valid, quad);
  }
}

}  // namespace

void launch_encode_books(cudaStream_t stream, const float* values, int64_t numel, int64_t levels, float* rest,
                         uint8_t* body) {
  launch(stream, blocks_of(numel), encode_blocks, values, numel, static_cast<int>(levels), rest,
         reinterpret_cast<uint16_t*>(body), body + book_bytes(numel, levels));
}

void launch_decode_books(cudaStream_t stream, const uint8_t* body, int64_t numel, int64_t levels, bool add,
                         float* values) {
  launch(stream, blocks_of(numel), add ? decode_blocks<true> : decode_blocks<false>,
         reinterpret_cast<const uint16_t*>(body), body + book_bytes(numel, levels), numel, static_cast<int>(levels),
         values);
}

}  // namespace ringprune::cuda
