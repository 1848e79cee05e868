// at::parallel_for on std::thread, put in front of torch's own for ThreadSanitizer alone.
//
// The sanitizer sees how these threads start and end. With OpenMP's, whose library is not compiled for it, it would
// report every hand-over. The ranges are torch's: as many, as long, and serial inside another parallel_for.

#pragma once

#include <c10/util/ParallelGuard.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace at {

__attribute__((visibility("default"))) int get_num_threads();  // torch's

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const int64_t entries = end - begin;
  if (entries <= 0) return;
  int64_t threads = c10::ParallelGuard::is_enabled() ? 1 : get_num_threads();
  if (grain > 0) threads = std::min(threads, (entries + grain - 1) / grain);
  const int64_t range = (entries + threads - 1) / threads;
  std::vector<std::exception_ptr> errors(threads);
  const auto run = [&](int64_t thread) {
    const c10::ParallelGuard guard(true);
    const int64_t lo = begin + thread * range;
    try {
      if (lo < end) body(lo, std::min(end, lo + range));
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace at
