"""Random calls of the native kernels under GCC's sanitizers; ``python -m tests.sanitizers --help``."""
