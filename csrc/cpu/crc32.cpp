// CRC-32 as zlib computes it, at the speed of memory: by products without carries, which fold what comes before over
// what comes next. (V. Gopal and others: Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009.)

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>

namespace ringprune {
namespace {

constexpr uint64_t kPolynomial = 0x104c11db7;  // of degree 32, the highest power first

// The order of all bits reversed, as CRC-32 has them in bytes.
constexpr uint64_t reversed(uint64_t polynomial, int bits) {
  uint64_t result = 0;
  for (int i = 0; i < bits; ++i) result |= (polynomial >> i & 1) << (bits - 1 - i);
  return result;
}

// What moves a word up by `power` bits when it is multiplied by it: that power of x, modulo the polynomial. The product
// of reversed numbers is one bit too low.
constexpr int64_t moving(int power) {
  uint64_t rest = 1;
  for (int i = 0; i < power; ++i) {
    rest <<= 1;
    if (rest >> 32) rest ^= kPolynomial;
  }
  return static_cast<int64_t>(reversed(rest, 32) << 1);
}

// The quotient of x^64 and the polynomial.
constexpr int64_t quotient() {
  uint64_t result = uint64_t{1} << 32, rest = kPolynomial << 32;  // their highest power has gone by
  for (int i = 31; i >= 0; --i) {
    if (!(rest >> (32 + i) & 1)) continue;
    result |= uint64_t{1} << i;
    rest ^= kPolynomial << i;
  }
  return static_cast<int64_t>(reversed(result, 33));
}

constexpr int kVectors = 4, kBits = 128, kVectorBytes = kBits / 8, kBytes = kVectors * kVectorBytes;

// By as much as all vectors have, by one, and by half of one; a half lies 32 bits lower or higher than the whole.
constexpr int64_t kAllLow = moving(kVectors * kBits + 32), kAllHigh = moving(kVectors * kBits - 32);
constexpr int64_t kOneLow = moving(kBits + 32), kOneHigh = moving(kBits - 32), kHalf = moving(kBits / 2);
constexpr int64_t kQuotient = quotient(), kDivisor = static_cast<int64_t>(reversed(kPolynomial, 33));
static_assert(kAllLow == 0x154442bd4 && kAllHigh == 0x1c6e41596, "the numbers of Intel's paper");

#define RINGPRUNE_FOLDS __attribute__((target("pclmul,sse4.1")))

RINGPRUNE_FOLDS inline __m128i load(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// `before`, moved up by as many bits as `by` says, plus `next`.
RINGPRUNE_FOLDS inline __m128i fold(__m128i before, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(before, by, 0x00), high = _mm_clmulepi64_si128(before, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Of whole vectors, kVectors or more; `crc` is what zlib keeps inverted.
RINGPRUNE_FOLDS uint32_t fold_all(uint32_t crc, const uint8_t* data, int64_t bytes) {
  const __m128i by_all = _mm_set_epi64x(kAllHigh, kAllLow);
  const __m128i by_one = _mm_set_epi64x(kOneHigh, kOneLow);
  __m128i sums[kVectors];
  for (int k = 0; k < kVectors; ++k) sums[k] = load(data + k * kVectorBytes);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  int64_t at = kBytes;
  for (; at + kBytes <= bytes; at += kBytes) {
    for (int k = 0; k < kVectors; ++k) sums[k] = fold(sums[k], by_all, load(data + at + k * kVectorBytes));
  }
  __m128i sum = sums[0];
  for (int k = 1; k < kVectors; ++k) sum = fold(sum, by_one, sums[k]);
  for (; at < bytes; at += kVectorBytes) sum = fold(sum, by_one, load(data + at));

  // 128 bits, and 32 zeros behind them, become 96, these 64, and their remainder is found by Barrett's reduction.
  const __m128i lowest = _mm_set_epi32(0, 0, 0, -1);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_one, 0x10));
  const __m128i by_half = _mm_set_epi64x(0, kHalf);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(_mm_and_si128(sum, lowest), by_half, 0x00));
  const __m128i divides = _mm_set_epi64x(kQuotient, kDivisor);
  const __m128i times = _mm_clmulepi64_si128(_mm_and_si128(sum, lowest), divides, 0x10);
  sum = _mm_xor_si128(sum, _mm_clmulepi64_si128(_mm_and_si128(times, lowest), divides, 0x00));
  return static_cast<uint32_t>(_mm_extract_epi32(sum, 1));
}

}  // namespace
}  // namespace ringprune
#endif

// How many of the bytes, from the first on, `ringprune_crc32` takes: all that fill whole vectors, or none where the
// processor multiplies otherwise or there are too few.
extern "C" [[gnu::used, gnu::visibility("default")]] int64_t ringprune_crc32_takes(int64_t bytes) {
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && bytes >= ringprune::kBytes) return bytes / ringprune::kVectorBytes * ringprune::kVectorBytes;
#endif
  return static_cast<void>(bytes), 0;
}

// CRC-32 of so many bytes behind those whose CRC-32 is `before`.
extern "C" [[gnu::used, gnu::visibility("default")]] uint32_t ringprune_crc32(uint32_t before, const uint8_t* data,
                                                                              int64_t bytes) {
#if defined(__x86_64__)
  return ~ringprune::fold_all(~before, data, bytes);
#else
  return static_cast<void>(data), static_cast<void>(bytes), before;
#endif
}
