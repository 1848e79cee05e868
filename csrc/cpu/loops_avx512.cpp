// The loops for x86 processors with AVX-512 (F, BW, DQ, VL: Skylake-X, Zen 4 and later).

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

// Only what follows is compiled for AVX-512: inline functions of the headers above may be shared with other files.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,bmi,bmi2,lzcnt,popcnt")
#define RINGPRUNE_SET avx512

namespace ringprune::avx512 {
namespace {

constexpr int kWidth = 16;

inline __mmask16 above(const uint32_t* keys, __m512i least) {
  return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(keys), least);
}

uint64_t at_least(const uint32_t* keys, uint32_t least) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(least));
  uint64_t mask = 0;
  for (int i = 0; i < 64; i += kWidth) mask |= static_cast<uint64_t>(above(keys + i, bound)) << i;
  return mask;
}

void compress(const uint32_t* keys, const int32_t* positions, uint32_t least, int64_t expected, int32_t* to) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(least));
  const int32_t* end = to + expected;
  // As long as a whole vector may be written, there are as many keys left to be read.
  for (; to + kWidth <= end; keys += kWidth, positions += kWidth) {
    // Compressed in a register: with memory as destination the instruction takes a hundred cycles on Zen 4.
    const __mmask16 mask = above(keys, bound);
    const __m512i position = _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(positions));
    _mm512_storeu_si512(to, position);
    to += __builtin_popcount(mask);
  }
  for (; to < end; ++keys, ++positions) {
    if (*keys >= least) *to++ = *positions;
  }
}

void look_up(const uint32_t* table, const int32_t* at, int64_t count, int32_t* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    _mm512_storeu_si512(to + i, _mm512_i32gather_epi32(_mm512_loadu_si512(at + i), table, 4));
  }
  for (; i < count; ++i) to[i] = static_cast<int32_t>(table[at[i]]);
}

void stream(const float* from, int64_t count, float* to) {
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(float) % kWidth);
  int64_t i = std::min(count, (kWidth - offset) % kWidth);
  if (i) std::memcpy(to, from, sizeof(float) * i);  // asked first: the call costs more than a short copy
  for (; i + kWidth <= count; i += kWidth) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
  if (i < count) std::memcpy(to + i, from + i, sizeof(float) * (count - i));
}

void fence() { _mm_sfence(); }

}  // namespace
}  // namespace ringprune::avx512

#include "loops_body.h"

namespace ringprune {
const Loops kAvx512Loops = avx512::table("AVX-512");
}
#endif
