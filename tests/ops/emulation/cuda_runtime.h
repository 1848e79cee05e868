// Stands in for CUDA's own, see cuda_on_cpu.h.

#pragma once

#include "cuda_on_cpu.h"
