"""The checksum is zlib's, wherever bytes begin and however they are split."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.ops.crc32 import FEWEST, bound, checksum
from ringprune.ops.library import native_library

BYTES = np.random.default_rng(0).integers(0, 256, 3 * FEWEST, dtype=np.uint8)
EDGES = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 4_096])


@given(begin=st.integers(0, 64), size=EDGES | st.integers(0, 1_000), before=st.integers(0, 2**32 - 1))
def test_it_is_that_of_zlib(begin: int, size: int, before: int) -> None:
    library = native_library("ringprune_crc32")
    if library is None:
        pytest.skip("the compiled library is not built, or RINGPRUNE_NATIVE=off")
    data = BYTES[begin : begin + size]
    assert checksum(data, before, bound(library)) == zlib.crc32(data.tobytes(), before)


@given(begin=st.integers(0, 64), size=st.integers(FEWEST - 20, 2 * FEWEST), split=st.floats(0, 1))
def test_parts_one_after_another_have_that_of_all(begin: int, size: int, split: float) -> None:
    data = BYTES[begin : begin + size]
    at = round(split * size)
    assert ops.crc32(data[at:], ops.crc32(data[:at])) == ops.crc32(data) == zlib.crc32(data.tobytes())


def test_a_processor_without_such_products_leaves_it_to_zlib() -> None:
    def never(*_: int) -> int:
        raise AssertionError("called for bytes that it does not take")

    assert checksum(BYTES, 7, (lambda _: 0, never)) == zlib.crc32(BYTES.tobytes(), 7)


def test_bytes_that_lie_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        ops.crc32(BYTES[::2])


@pytest.mark.parametrize("bit", [0, 7, 8 * FEWEST, 8 * 2 * FEWEST - 1])
def test_a_single_bit_is_seen(bit: int) -> None:
    data = BYTES[: 2 * FEWEST].copy()
    data[bit // 8] ^= 1 << bit % 8
    assert ops.crc32(data) != ops.crc32(BYTES[: 2 * FEWEST])
