// The choice of the loops: by processor, once; tests may ask for less.

#include "loops.h"

#include <atomic>

namespace ringprune {
namespace {

const Loops* widest(int most) {
#ifdef RINGPRUNE_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (most >= 2 && avx2 && avx512) return &kAvx512Loops;
  if (most >= 1 && avx2) return &kAvx2Loops;
#endif
  return &kPortableLoops;
}

std::atomic<const Loops*> chosen{widest(2)};

}  // namespace

const Loops& loops() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace ringprune

// Uses the widest instruction set up to `most` (0 portable, 1 AVX2, 2 AVX-512) that there is; returns its name.
extern "C" [[gnu::used, gnu::visibility("default")]] const char* ringprune_use_instructions(int most) {
  ringprune::chosen = ringprune::widest(most);
  return ringprune::loops().name;
}
