// The loops, included once per instruction set by loops_<set>.cpp, which define before:
//   RINGPRUNE_SET       namespace and name of the set
//   at_least, compress, look_up, stream, fence  in that namespace, written for the set
//
// Everything else is plain C++ that the compiler turns into vectors of the set's width.

namespace ringprune::RINGPRUNE_SET {
namespace {

inline bool is_nonfinite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7f800000u) == 0x7f800000u;
}

// What the accumulating loops work on, read of a run field by field: for all the compiler knows, results are stored
// over what stays in memory. A copy of the run would be loads of vectors over fields that have been stored one by one,
// each of which waits as replace() says.
struct Operands {
  const float* const grad;
  const float* const weight;
  const float* const residual;
  const float* const velocity;
  float* const residual_out;
  float* const velocity_out;
  const float factor;
  const float momentum;
  const float parameter;

  explicit Operands(const Run& run)
      : grad(run.grad),
        weight(run.weight),
        residual(run.residual),
        velocity(run.velocity),
        residual_out(run.residual_out),
        velocity_out(run.velocity_out),
        factor(run.factor),
        momentum(run.momentum),
        parameter(run.parameter) {}
};

template <Correction kCorrection>
inline float change(const Operands& of, int64_t i) {
  const float gradient = of.grad[i] * of.factor;
  if constexpr (kCorrection == kNoMomentum) return gradient;
  float velocity = of.velocity[i];
  const float result = corrected<kCorrection == kNesterov>(gradient, of.momentum, velocity);
  of.velocity_out[i] = velocity;
  return result;
}

// Operands that are stored together where one of them is replaced.
constexpr int64_t kGroup = 16;

// Replaces one result. Where the run streams, all kGroup that it lies among are stored with it: a store of its own
// would hold up the load of the vector it lies in until all stores before it are done, those past the caches too.
inline void replace(const Run& run, float* results, int64_t i, float value) {
  if (!run.streams) {
    results[i] = value;
    return;
  }
  float* group = results + i / kGroup * kGroup;
  const auto lane = static_cast<int32_t>(i % kGroup);
#pragma omp simd
  for (int32_t j = 0; j < kGroup; ++j) group[j] = j == lane ? value : group[j];
}

// The results at entries that were sent, made once more of what is left there; calls done(i, residual) for each.
template <Correction kCorrection, class Done>
inline void mend(const Run& run, const Operands& of, const Done& done) {
  const Gone& gone = run.gone;
  for (int64_t j = 0; j < gone.count; ++j) {
    const int64_t i = gone.entry[j] - gone.base;
    float more = of.grad[i] * of.factor;
    if constexpr (kCorrection != kNoMomentum) {
      // The outputs may be the inputs, so the old velocity may be gone; where it counts, the new one has it.
      const float velocity = gone.masked ? of.momentum * 0.0f + more : of.velocity_out[i];
      if (gone.masked) replace(run, of.velocity_out, i, velocity);
      more = added<kCorrection == kNesterov>(more, of.momentum, velocity);
    }
    const float residual = (gone.rest ? gone.rest[j] : 0.0f) + more;
    replace(run, of.residual_out, i, residual);
    done(i, residual);
  }
}

// Operands whose results go past the caches together: their stores have to overlap with the reads of the next ones.
constexpr int64_t kPiece = 128;
static_assert(kPiece % kGroup == 0);

// Calls body(piece, i) for the pieces of a run, which begin at its entry i, and stores their results past the caches.
// The run itself becomes one piece after the other, field by field.
template <class Body>
inline int64_t streamed(Run& run, const Body& body) {
  alignas(64) float residual[kPiece];
  alignas(64) float velocity[kPiece];
  float* const residual_out = std::exchange(run.residual_out, residual);
  float* const velocity_out = std::exchange(run.velocity_out, velocity);
  const int64_t entries = run.count;
  int64_t gone = run.gone.count;
  const auto start = static_cast<int64_t>(reinterpret_cast<uintptr_t>(residual_out) / sizeof(float));
  int64_t result = 0;
  for (int64_t i = 0; i < entries;) {
    const int64_t count = std::min(kPiece - (start + i) % kPiece, entries - i);
    int64_t number = 0;
    while (number < gone && run.gone.entry[number] - run.gone.base < count) ++number;
    run.count = count;
    run.gone.count = number;
    result += body(run, i);
    stream(residual, count, residual_out + i);
    if (velocity_out) stream(velocity, count, velocity_out + i);
    i += count;
    gone -= number;
    run.grad += count;
    if (run.weight) run.weight += count;
    run.residual += count;
    if (run.velocity) run.velocity += count;
    run.gone.base += count;
    run.gone.entry += number;
    if (run.gone.rest) run.gone.rest += number;
  }
  return result;
}

// Not inlined: where it was, gcc made two loops of it, with and without what is gone, and no vectors of the latter.
template <Correction kCorrection>
[[gnu::noinline]] int64_t accumulate_run(const Run& run) {
  const Operands of(run);
  const int64_t count = run.count;
  int32_t nonfinite = 0;
#pragma omp simd reduction(+ : nonfinite)
  for (int64_t i = 0; i < count; ++i) {
    nonfinite += is_nonfinite(of.grad[i]);
    of.residual_out[i] = of.residual[i] + change<kCorrection>(of, i);
  }
  mend<kCorrection>(run, of, [](int64_t, float) {});
  return nonfinite;
}

template <Correction kCorrection>
int64_t accumulate(Run& run) {
  if (run.streams) return streamed(run, [](const Run& piece, int64_t) { return accumulate_run<kCorrection>(piece); });
  return accumulate_run<kCorrection>(run);
}

template <Correction kCorrection, class Score>
[[gnu::noinline]] int64_t accumulate_keys_run(const Run& run, uint32_t* keys) {
  const Operands of(run);
  const int64_t count = run.count;
  int32_t nonfinite = 0;
#pragma omp simd reduction(+ : nonfinite)
  for (int64_t i = 0; i < count; ++i) {
    nonfinite += is_nonfinite(of.grad[i]);
    const float residual = of.residual[i] + change<kCorrection>(of, i);
    of.residual_out[i] = residual;
    keys[i] = key_of(Score{}(residual, of.weight[i], of.parameter));
  }
  mend<kCorrection>(
      run, of, [&](int64_t i, float residual) { keys[i] = key_of(Score{}(residual, of.weight[i], of.parameter)); });
  return nonfinite;
}

template <Correction kCorrection, class Score>
int64_t accumulate_keys(Run& run, uint32_t* keys) {
  if (run.streams) {
    return streamed(
        run, [&](const Run& piece, int64_t i) { return accumulate_keys_run<kCorrection, Score>(piece, keys + i); });
  }
  return accumulate_keys_run<kCorrection, Score>(run, keys);
}

template <class Score>
void keys(const Run& given, uint32_t* to) {
  const Run run = given;
#pragma omp simd
  for (int64_t i = 0; i < run.count; ++i) {
    to[i] = key_of(Score{}(run.residual_out[i], run.weight[i], run.parameter));
  }
}

template <class Score>
void scores(const Run& given, float* to) {
  const Run run = given;
#pragma omp simd
  for (int64_t i = 0; i < run.count; ++i) to[i] = Score{}(run.residual_out[i], run.weight[i], run.parameter);
}

void keys_of(const float* scores, int64_t count, uint32_t* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = key_of(scores[i]);
}

template <class scalar_t>
void widen(const void* from, int64_t count, float* to) {
  const auto* narrow = static_cast<const scalar_t*>(from);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(narrow[i]);
}

int64_t count_nonfinite(const float* from, int64_t count) {
  int64_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) found += is_nonfinite(from[i]);
  return found;
}

// Takes kAtOnce positions of every word, whether it has so many or not: where candidates are is not to be predicted,
// and a wrong guess costs more than some idle instructions.
template <int kAtOnce>
int64_t find(const uint32_t* keys, int64_t count, uint32_t least, int32_t* positions) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kWord) {
    uint64_t mask = at_least(keys + i, least);
    const int number = std::popcount(mask);
    int32_t* next = positions + found;
    const auto take = [&] {
      __asm__("" : "+r"(mask));  // or the compiler finds out that 0 stays 0, and branches on it
      *next++ = static_cast<int32_t>(i) + std::countr_zero(mask);
      mask &= mask - 1;
    };
    for (int j = 0; j < kAtOnce; ++j) take();
    while (mask) take();
    found += number;
  }
  return found;
}

int64_t collect(const uint32_t* keys, int64_t count, uint32_t least, int32_t base, bool dense, uint32_t* to,
                int32_t* positions) {
  const int64_t found = (dense ? find<8> : find<4>)(keys, count, least, positions);
  for (int64_t i = 0; i < found; ++i) {
    to[i] = keys[positions[i]];
    positions[i] += base;
  }
  return found;
}

double square_sum(const float* from, int64_t count) {
  alignas(64) double sums[kBlock] = {};
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<double>(from[i]) * static_cast<double>(from[i]);
  return tree_sum(sums, count);
}

template <bool kAdam>
void share_momentum(const Shared& given) {
  const Shared run = given;
#pragma omp simd
  for (int64_t i = 0; i < run.count; ++i) {
    share<kAdam>(run.average[i], run.elapsed[i], run.momentum[i], run.weight[i], run.own[i],
                 kAdam ? run.square[i] : 0.0f, run.pace);
  }
}

uint32_t largest_magnitude(const float* from, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, books::bits_of(from[i]) & books::kMagnitudeBits);
  return largest;
}

void sort_into_bins(const float* from, int64_t count, int32_t base, int32_t* bins) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) bins[i] = books::bin_of(books::bits_of(from[i]), base);
}

void resolve_bins(const int64_t* held, const int64_t* held_besides, int32_t base, books::Bins& bins) {
  static constexpr auto kCounts = books::roots_of_counts();
  static constexpr auto kWidths = books::roots_of_widths();
  std::array<int64_t, books::kBookBins> sums;
#pragma omp simd
  for (int b = 0; b < books::kBookBins; ++b) {
    const int64_t both = held[b] + held_besides[b], sum = books::sum_of(b, both, base);
    const auto count = static_cast<int32_t>(both >> 32);
    sums[b] = sum;
    bins.count[b] = count;
    bins.mean[b] = books::mean_of(sum, count);
  }
  int32_t counted = 0;
  int64_t summed = 0, reached = 0;
  for (int b = 0; b < books::kBookBins; ++b) {
    bins.counted[b] = counted;
    bins.summed[b] = summed;
    counted += bins.count[b];
    summed += sums[b];
    bins.reached[b] = reached += int64_t{kCounts[bins.count[b]]} * kWidths[b];
  }
  bins.counted[books::kBookBins] = counted;
  bins.summed[books::kBookBins] = summed;
}

void round_to_levels(const float* from, const int32_t* bins, const uint32_t* table, int64_t count, int32_t* codes,
                     float* rest) {
  look_up(table, bins, count, codes);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto entry = static_cast<uint32_t>(codes[i]);
    rest[i] = from[i] - books::float_of(entry & 0xffff0000u);
    codes[i] = static_cast<int32_t>(entry & 0xffffu);
  }
}

// Calls whole(i) for every kAtOnce numbers from the i-th on, and part(i, number) for what is left.
template <int kAtOnce, class Whole, class Part>
inline void in_words(int64_t count, const Whole& whole, const Part& part) {
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) whole(i);
  if (i < count) part(i, count - i);
}

template <int kBits>
void join(const int32_t* codes, int64_t count, uint8_t* to) {
  constexpr int kAtOnce = 32 / kBits;
  const auto whole = [&](int64_t i) {
    uint32_t word = 0;
#pragma omp simd reduction(| : word)
    for (int e = 0; e < kAtOnce; ++e) word |= static_cast<uint32_t>(codes[i + e]) << (e * kBits);
    std::memcpy(to + i * kBits / 8, &word, sizeof(word));
  };
  in_words<kAtOnce>(count, whole, [&](int64_t i, int64_t number) {
    uint32_t word = 0;
    for (int64_t e = 0; e < number; ++e) word |= static_cast<uint32_t>(codes[i + e]) << (e * kBits);
    std::memcpy(to + i * kBits / 8, &word, (number * kBits + 7) / 8);
  });
}

template <int kBits>
inline void split(const uint8_t* joined, int64_t count, int32_t* codes) {
  constexpr int kAtOnce = 32 / kBits;
  constexpr uint32_t kCode = (1u << kBits) - 1;
  const auto whole = [&](int64_t i) {
    uint32_t word;
    std::memcpy(&word, joined + i * kBits / 8, sizeof(word));
#pragma omp simd
    for (int e = 0; e < kAtOnce; ++e) codes[i + e] = static_cast<int32_t>(word >> (e * kBits) & kCode);
  };
  in_words<kAtOnce>(count, whole, [&](int64_t i, int64_t number) {
    for (int64_t e = i; e < i + number; ++e) codes[e] = joined[e * kBits / 8] >> (e * kBits % 8) & kCode;
  });
}

template <int kBits, bool kAdd>
void decode(const uint8_t* joined, const float* levels, int64_t count, float* values) {
  alignas(64) std::array<int32_t, kBlock> codes;
  alignas(64) std::array<int32_t, kBlock> found;
  for_each_block(0, count, [&](int64_t start, int64_t number) {
    split<kBits>(joined + start * kBits / 8, number, codes.data());
    look_up(reinterpret_cast<const uint32_t*>(levels), codes.data(), number, found.data());
#pragma omp simd
    for (int64_t i = 0; i < number; ++i) {
      const float level = books::float_of(static_cast<uint32_t>(found[i]));
      values[start + i] = kAdd ? values[start + i] + level : level;
    }
  });
}

#define RINGPRUNE_FOR_SCORES(what) {what(Ratio), what(Magnitude), what(Sum), what(Product)}
#define RINGPRUNE_PLAIN(Score) accumulate_keys<kNoMomentum, Score>
#define RINGPRUNE_MOMENTUM(Score) accumulate_keys<kMomentum, Score>
#define RINGPRUNE_NESTEROV(Score) accumulate_keys<kNesterov, Score>
#define RINGPRUNE_KEYS(Score) keys<Score>
#define RINGPRUNE_SCORES(Score) scores<Score>

constexpr Loops table(const char* name) {
  return {
      name,
      {accumulate<kNoMomentum>, accumulate<kMomentum>, accumulate<kNesterov>},
      {RINGPRUNE_FOR_SCORES(RINGPRUNE_PLAIN), RINGPRUNE_FOR_SCORES(RINGPRUNE_MOMENTUM),
       RINGPRUNE_FOR_SCORES(RINGPRUNE_NESTEROV)},
      RINGPRUNE_FOR_SCORES(RINGPRUNE_KEYS),
      keys_of,
      RINGPRUNE_FOR_SCORES(RINGPRUNE_SCORES),
      collect,
      at_least,
      compress,
      widen<c10::Half>,
      widen<c10::BFloat16>,
      count_nonfinite,
      square_sum,
      share_momentum<false>,
      share_momentum<true>,
      largest_magnitude,
      sort_into_bins,
      resolve_bins,
      round_to_levels,
      join<2>,
      join<4>,
      {decode<2, false>, decode<2, true>},
      {decode<4, false>, decode<4, true>},
      stream,
      fence,
  };
}

}  // namespace
}  // namespace ringprune::RINGPRUNE_SET
