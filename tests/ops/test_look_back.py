"""How the CUDA kernels add up what strips have before them; see csrc/cuda/positions.cuh."""

import ctypes
import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

LIBRARY = os.environ.get("RINGPRUNE_EMULATED", "")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs the emulated kernels, as test_emulation.py builds them")


@given(strips=st.integers(0, 600), whole=st.floats(0, 0.2), seed=st.integers(0, 2**32 - 1))
@example(strips=600, whole=0.0, seed=0)  # nobody knows more than its own: back to the first
@example(strips=128, whole=0.0, seed=0)
@example(strips=600, whole=1.0, seed=0)
def test_emulated_strips_find_what_comes_before(strips: int, whole: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    above, equal = (random.integers(0, (2**31 - 1) // 600, strips, dtype=np.uint64) for _ in range(2))
    own, known = above << np.uint64(32) | equal, (random.random(strips) < whole).astype(np.uint8)
    before = ctypes.CDLL(LIBRARY).ringprune_counts_before
    before.restype = ctypes.c_uint64
    arrays = (array.ctypes.data_as(ctypes.c_void_p) for array in (own, known))
    found = before(*arrays, ctypes.c_int32(strips))
    assert (found >> 32, found & (2**32 - 1)) == (int(above.sum()), int(equal.sum()))
