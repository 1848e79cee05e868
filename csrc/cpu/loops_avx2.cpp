// The loops for x86 processors with AVX2 (2013 and later).

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstring>
#include <utility>

#include "../arithmetic.h"
#include "loops.h"
#include "tree_sum.h"

#ifdef RINGPRUNE_X86
#include <immintrin.h>

#include <algorithm>
#include <array>

// Only what follows is compiled for AVX2: inline functions of the headers above may be shared with other files.
#pragma GCC target("avx2,f16c,bmi,bmi2,lzcnt,popcnt")
#define RINGPRUNE_SET avx2

namespace ringprune::avx2 {
namespace {

constexpr int kWidth = 8;

// For every mask of 8 bits the numbers of its set bits, in order.
struct Lanes {
  alignas(32) int32_t of[256][kWidth] = {};
  constexpr Lanes() {
    for (int mask = 0; mask < 256; ++mask) {
      int used = 0;
      for (int lane = 0; lane < kWidth; ++lane) {
        if (mask >> lane & 1) of[mask][used++] = lane;
      }
    }
  }
};
constexpr Lanes kSet;

// Keys are below 2^31, so that the signed comparison is right.
inline uint32_t above(const uint32_t* keys, __m256i bound) {
  const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, bound))));
}

// The comparisons of four vectors, packed to a byte for each key and put in order: one movemask instead of four.
inline uint32_t above_32(const uint32_t* keys, __m256i bound) {
  const auto compare = [&](int i) {
    return _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i * kWidth)), bound);
  };
  const __m256i low = _mm256_packs_epi32(compare(0), compare(1));
  const __m256i high = _mm256_packs_epi32(compare(2), compare(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs works in halves of a vector
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order)));
}

uint64_t at_least(const uint32_t* keys, uint32_t least) {
  const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(least - 1));
  return above_32(keys, bound) | static_cast<uint64_t>(above_32(keys + 32, bound)) << 32;
}

void compress(const uint32_t* keys, const int32_t* positions, uint32_t least, int64_t expected, int32_t* to) {
  const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(least - 1));
  const int32_t* end = to + expected;
  // As long as a whole vector may be written, there are as many keys left to be read.
  for (; to + kWidth <= end; keys += kWidth, positions += kWidth) {
    const uint32_t mask = above(keys, bound);
    const __m256i lanes = _mm256_load_si256(reinterpret_cast<const __m256i*>(kSet.of[mask]));
    const __m256i position = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(position, lanes));
    to += __builtin_popcount(mask);
  }
  for (; to < end; ++keys, ++positions) {
    if (*keys >= least) *to++ = *positions;
  }
}

void look_up(const uint32_t* table, const int32_t* at, int64_t count, int32_t* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m256i places = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + i));
    const __m256i found = _mm256_i32gather_epi32(reinterpret_cast<const int32_t*>(table), places, 4);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), found);
  }
  for (; i < count; ++i) to[i] = static_cast<int32_t>(table[at[i]]);
}

void stream(const float* from, int64_t count, float* to) {
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(float) % kWidth);
  int64_t i = std::min(count, (kWidth - offset) % kWidth);
  if (i) std::memcpy(to, from, sizeof(float) * i);  // asked first: the call costs more than a short copy
  for (; i + kWidth <= count; i += kWidth) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
  if (i < count) std::memcpy(to + i, from + i, sizeof(float) * (count - i));
}

void fence() { _mm_sfence(); }

}  // namespace
}  // namespace ringprune::avx2

#include "loops_body.h"

namespace ringprune {
const Loops kAvx2Loops = avx2::table("AVX2");
}
#endif
