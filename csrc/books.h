// Fitting a book of levels to a block of values, written once for CPU and CUDA (ringprune/ops/encode_books.py, which
// says what is done and why). Each operation is rounded by itself, and sums go in one order: all give the same bits.

#pragma once

#include <c10/macros/Macros.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace ringprune::books {

constexpr int kBookValues = 2048;  // values that share a book
constexpr int kMostLevels = 16;
constexpr int kRounds = 6;

constexpr int kShift = 19;  // leaves sign, exponent and 4 bits of the fraction
constexpr int kPowers = 12;
constexpr int kHalf = 16 * kPowers;  // bins of one sign
constexpr int kBookBins = 2 * kHalf + 1;

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kMagnitudeBits = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint16_t kNaN = 0x7fc0u;  // bfloat16's
constexpr uint32_t kLargestLevel = 0x3fff0000u;
constexpr float kSmallestLevel = 1.0f / (1 << kPowers);
constexpr int32_t kPowerOfOne = 127;

// A bin of the histogram holds kOne times its number of values, plus the sum of their bits below the bin's.
constexpr int64_t kOne = int64_t{1} << 32;
constexpr uint32_t kBelow = (1u << kShift) - 1;

// With the block's largest magnitude between 1 and 2, all that are told apart from zero are multiples of this, so that
// sums of a block's values are exact.
constexpr double kUnit = 1.0 / (int64_t{1} << (kPowers + 23));

// By Newton's method from far off: the same bits wherever doubles are IEEE's, which libraries' roots are not.
constexpr double cube_root(double x) {
  double root = x > 1.0 ? x : 1.0;
  for (int i = 0; i < 40; ++i) root = (2.0 * root + x / (root * root)) / 3.0;
  return x > 0.0 ? root : 0.0;
}

// The smallest magnitude of the bin that many above that of zero, where that begins at 1.
constexpr double edge_above(int bin) {
  double edge = 1.0 + (bin % 16) / 16.0;
  for (int power = 0; power < bin / 16; ++power) edge *= 2.0;
  return edge;
}

// Rounded to a whole multiple of 2^-20.
constexpr int32_t rounded_root(double x) { return static_cast<int32_t>(cube_root(x) * (1 << 20) + 0.5); }

constexpr std::array<int32_t, kBookValues + 1> roots_of_counts() {
  std::array<int32_t, kBookValues + 1> roots{};
  for (int count = 0; count <= kBookValues; ++count) roots[count] = rounded_root(count);
  return roots;
}

// The width of each bin to the power of 2/3, up to a factor.
constexpr std::array<int32_t, kBookBins> roots_of_widths() {
  std::array<int32_t, kBookBins> roots{};
  for (int above = 0; above <= kHalf; ++above) {
    const double width = above == 0 ? 2.0 : edge_above(above) - edge_above(above - 1);
    roots[kHalf + above] = roots[kHalf - above] = rounded_root(width * width);
  }
  return roots;
}

C10_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
C10_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The leading bits of the largest magnitude in the bin of zero.
C10_HOST_DEVICE inline int32_t base_of(uint32_t largest) { return static_cast<int32_t>(largest >> kShift) - kHalf; }

// Below, nothing of a block is sent.
C10_HOST_DEVICE inline bool is_too_small(int32_t base) { return base < kHalf; }

C10_HOST_DEVICE inline int32_t bin_of(uint32_t bits, int32_t base) {
  int32_t above = static_cast<int32_t>((bits & kMagnitudeBits) >> kShift) - base;
  above = above > 0 ? above : 0;
  return kHalf + (bits < kSign ? above : -above);
}

// The exponent of the block's largest magnitude, as float32 holds it, less that of 1.
C10_HOST_DEVICE inline int32_t power_of(int32_t base) { return ((base + kHalf) >> 4) - kPowerOfOne; }

// The leading bits of the smallest magnitude in a bin, with the block's largest between 1 and 2.
C10_HOST_DEVICE inline int32_t leading_of(int bin, int32_t base) {
  return base + (bin < kHalf ? kHalf - bin : bin - kHalf) - power_of(base) * 16;
}

C10_HOST_DEVICE inline float edge_of(int bin, int32_t base) {
  return float_of(static_cast<uint32_t>(leading_of(bin, base)) << kShift);
}

// What is known of each bin, and of all that are below it; sums in units of kUnit.
struct Bins {
  double mean[kBookBins];
  int32_t count[kBookBins];
  int32_t counted[kBookBins + 1];
  int64_t summed[kBookBins + 1];
  int64_t reached[kBookBins];  // sums of the cube roots of the density, this bin's included
};

// The sum of a bin's values, of which the histogram holds `held`.
C10_HOST_DEVICE inline int64_t sum_of(int bin, int64_t held, int32_t base) {
  const int32_t leading = leading_of(bin, base);
  const int64_t of_one = int64_t{16 + (leading & 15)} << kShift;
  const int64_t sum = ((held >> 32) * of_one + (held & (kOne - 1))) << ((leading >> 4) - kPowerOfOne + kPowers);
  return bin == kHalf ? 0 : bin < kHalf ? -sum : sum;
}

// No number's mean is 0, without a branch: loops over bins are vectors.
C10_HOST_DEVICE inline double mean_of(int64_t sum, int32_t count) {
  return static_cast<double>(sum) * kUnit / static_cast<double>(count > 0 ? count : 1);
}

// Levels that are as dense as the cube root of the distribution.
C10_HOST_DEVICE inline void begin(const Bins& bins, double* levels, int count) {
  const int64_t total = bins.reached[kBookBins - 1];
  int low = 0;
  for (int j = 0; j < count; ++j) {
    for (int high = kBookBins - 1; low < high;) {
      const int middle = (low + high) / 2;
      if (bins.reached[middle] * 2 * count >= total * (2 * j + 1)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    levels[j] = bins.mean[low];
  }
}

// How many bins have means below `border`.
C10_HOST_DEVICE inline int bins_below(const Bins& bins, int32_t base, double border) {
  const uint32_t bits = bits_of(static_cast<float>(border));
  int32_t above = static_cast<int32_t>((bits & kMagnitudeBits) >> kShift) - base + power_of(base) * 16;
  above = above < 0 ? 0 : above > kHalf ? kHalf : above;
  const int b = kHalf + (bits < kSign ? above : -above);
  return bins.mean[b] < border ? b + 1 : b;
}

// Moves each level but `zero` to the mean of the values nearest to it, again and again; then rounds to bfloat16.
C10_HOST_DEVICE inline void improve(const Bins& bins, int32_t base, double* levels, int count, int zero) {
  for (int round = 0; round < kRounds; ++round) {
    int32_t counted = 0;
    int64_t summed = 0;
    for (int j = 0; j < count; ++j) {
      const int end = j + 1 < count ? bins_below(bins, base, (levels[j] + levels[j + 1]) / 2.0) : kBookBins;
      const int32_t here = bins.counted[end] - counted;
      if (here > 0) {
        if (j != zero) levels[j] = mean_of(bins.summed[end] - summed, here);
        counted = bins.counted[end];
        summed = bins.summed[end];
      }
    }
  }
  for (int j = 0; j < count; ++j) {
    const uint32_t bits = bits_of(static_cast<float>(levels[j])), near = (bits & kMagnitudeBits) + 0x8000u;
    const float level = float_of((near < kLargestLevel ? near : kLargestLevel) & 0xffff0000u);
    const double kept = level >= kSmallestLevel ? level : 0.0;
    levels[j] = bits < kSign ? kept : -kept;
  }
}

// For each bin the level nearest to its mean that leaves an exact rest, and its code; false where there is none.
C10_HOST_DEVICE inline bool assign(const Bins& bins, int32_t base, const double* levels, int count, uint8_t* codes,
                                   float* level_of) {
  int nearest = 0;
  const int last = count - 1;
  for (int b = 0; b < kBookBins; ++b) {
    codes[b] = 0;
    level_of[b] = 0.0f;
    if (bins.count[b] == 0) continue;
    const double mean = bins.mean[b];
    while (nearest < last && levels[nearest + 1] - mean < mean - levels[nearest]) ++nearest;
    const double most = b != kHalf ? 2.0f * edge_of(b, base) : 0.0f;
    int j = nearest;
    while (j > 0 && levels[j] > most) --j;
    while (j < last && levels[j] < -most) ++j;
    if (levels[j] > most || levels[j] < -most || levels[j] * mean < 0.0) return false;
    codes[b] = static_cast<uint8_t>(j);
    level_of[b] = static_cast<float>(levels[j]);
  }
  return true;
}

// The book of a block, the bits of bfloat16 levels, and for each bin the code and the level that its values get.
C10_HOST_DEVICE inline void fit(const Bins& bins, int32_t base, int count, uint16_t* book, uint8_t* codes,
                                float* level_of) {
  double levels[kMostLevels];
  begin(bins, levels, count);
  bool exact = false;
  if (bins.count[kHalf] == 0) {  // no value is near zero, so that all levels may be elsewhere
    improve(bins, base, levels, count, -1);
    exact = assign(bins, base, levels, count, codes, level_of);
  }
  if (!exact) {
    int zero = 0;
    for (int j = 0; j < count; ++j) {  // of several alike the innermost, so that levels stay ascending
      const double here = levels[j] < 0.0 ? -levels[j] : levels[j],
                   there = levels[zero] < 0.0 ? -levels[zero] : levels[zero];
      if (here < there || (levels[j] == levels[zero] && levels[j] < 0.0)) zero = j;
    }
    levels[zero] = 0.0;
    improve(bins, base, levels, count, zero);
    assign(bins, base, levels, count, codes, level_of);
  }
  const auto power = static_cast<uint32_t>(power_of(base));
  for (int j = 0; j < count; ++j) {
    const uint32_t bits = bits_of(static_cast<float>(levels[j])) >> 16;
    book[j] = levels[j] != 0.0 ? static_cast<uint16_t>(bits + (power << 7)) : uint16_t{0};
  }
  const float scale = float_of((power + kPowerOfOne) << 23);
  for (int b = 0; b < kBookBins; ++b) level_of[b] *= scale;
}

// Bits of a code, where a book has that many levels.
C10_HOST_DEVICE constexpr int bits_per_code(int64_t levels) { return levels == kMostLevels ? 4 : 2; }

constexpr int64_t blocks_of(int64_t values) { return (values + kBookValues - 1) / kBookValues; }

// Bytes of all books, which come first in a message's body, and of all codes, in whole words of 8 bytes.
constexpr int64_t book_bytes(int64_t values, int64_t levels) { return 2 * levels * blocks_of(values); }
constexpr int64_t code_bytes(int64_t values, int64_t levels) {
  return ((values * bits_per_code(levels) + 7) / 8 + 7) / 8 * 8;
}

}  // namespace ringprune::books
