"""CUDA on the CPU: the kernels of csrc/cuda without a GPU."""
