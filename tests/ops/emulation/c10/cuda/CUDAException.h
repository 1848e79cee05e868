// Stands in for torch's own, see cuda_on_cpu.h.

#pragma once

#include <c10/macros/Macros.h>

#define C10_CUDA_CHECK(call) static_cast<void>(call)
