// The line that tells, without loading the library, which torch it was built for (read by ringprune/ops/library.py).
//
// The ops are defined in ringprune/ops/<op>.py; each kernel file registers its own kernels at its foot.

#include <torch/version.h>

#ifdef _OPENMP
#define RINGPRUNE_THREADS "OpenMP"
#else
#define RINGPRUNE_THREADS "none"  // at::parallel_for is serial without -fopenmp
#endif

extern "C" [[gnu::used, gnu::visibility("default")]] const char ringprune_native_build[] =
    "ringprune native library, built for torch " TORCH_VERSION ", threads " RINGPRUNE_THREADS;
