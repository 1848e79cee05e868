// Stands in for torch's own, see cuda_on_cpu.h.

#pragma once

#include <c10/macros/Macros.h>

#include <stdexcept>

#define C10_CUDA_CHECK(call)                                          \
  do {                                                                \
    if ((call) != 0) throw std::runtime_error("CUDA on CPU: " #call); \
  } while (0)
