"""Pairs come back as they were but for what rounding keeps, in the bytes announced; anything else is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.errors import CommunicatorError, ConfigurationError
from ringprune.wire import INDEX_FORMATS, VALUE_FORMATS, PairCode, pair_code
from ringprune.wire.message import FRAME_BYTES
from ringprune.wire.pairs import Indices, Values


def pairs(count: int, numel: int, seed: int = 0) -> tuple[Indices, Values]:
    draw = np.random.default_rng(seed)
    return np.sort(draw.choice(numel, count, replace=False)).astype(np.int32), draw.normal(size=count).astype(
        np.float32
    )


@given(
    st.sampled_from(INDEX_FORMATS), st.sampled_from(VALUE_FORMATS), st.integers(1, 3000), st.data(), st.integers(0, 400)
)
def test_pairs_come_back(indices: str, values: str, numel: int, data: st.DataObject, expected: int) -> None:
    """However many were expected: the format is chosen for that number, and holds any."""
    given_indices, given_values = pairs(data.draw(st.integers(0, min(numel, 500))), numel)
    code = pair_code(min(expected, numel), numel, indices, values)
    rest = np.full_like(given_values, np.nan)
    message = code.encode(given_indices, given_values, rest)
    assert message.dtype == torch.uint8 and message.numel() == code.size(given_indices.size)
    got_indices, got_values = code.decode(message, given_indices.size, name="m")
    assert (got_indices == given_indices).all() and got_indices.dtype == np.int32
    assert (got_values + rest == given_values).all() and got_values.dtype == np.float32


def test_a_thousand_of_a_hundred_thousand_take_the_bytes_of_the_document() -> None:
    """Frame, Elias-Fano as an index message has it, values, each in whole words."""
    code = pair_code(1000, 100_000)
    assert code.size(1000) == FRAME_BYTES + code.indices.position_bytes + 4000
    assert 8.5 < 8 * code.indices.position_bytes / 1000 < 8.7
    assert code.index_share == pytest.approx(code.indices.position_bytes / (code.indices.position_bytes + 4000))
    assert pair_code(1000, 100_000, values="bf16").size(1000) == code.size(1000) - 2000 + FRAME_BYTES
    assert pair_code(1000, 100_000, values="int8").size(3) == code.size(3), "a code is used where it is shorter"


@pytest.mark.parametrize("values", ["fp32", "int8"])
@pytest.mark.parametrize("spoilt", ["byte", "length", "format", "count"])
def test_anything_else_is_refused(values: str, spoilt: str) -> None:
    indices, given_values = pairs(100, 1000)
    code = pair_code(100, 1000, values=values)
    message = code.encode(indices, given_values, np.zeros_like(given_values))
    reader: PairCode = pair_code(100, 1000, "bitmap", values) if spoilt == "format" else code
    if spoilt == "byte":
        message[-1] ^= 1
    if spoilt == "length":
        message = message[:-8]
    with pytest.raises(CommunicatorError, match="bucket 3 from rank 2"):
        reader.decode(message, 104 if spoilt == "count" else 100, name="bucket 3 from rank 2")


@pytest.mark.parametrize("form", [form for form in INDEX_FORMATS if form != "auto"])
@pytest.mark.parametrize("count", [99, 101])
def test_a_count_that_is_wrong_by_one_is_refused(form: str, count: int) -> None:
    """Of a list the last pair was lost without a word, where the message is as long: words are of two indices."""
    indices, given_values = pairs(100, 1000)
    code = pair_code(100, 1000, form)
    message = code.encode(indices, given_values, np.zeros_like(given_values))
    with pytest.raises(CommunicatorError, match="m: "):
        code.decode(message, count, name="m")


def test_indices_that_do_not_ascend_are_refused() -> None:
    code = pair_code(4, 1000, "list")
    message = code.encode(np.array([5, 3, 7, 9], np.int32), np.ones(4, np.float32), np.zeros(4, np.float32))
    with pytest.raises(CommunicatorError, match="m: the indices proposed are not ascending positions below 1000"):
        code.decode(message, 4, name="m")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="values"):
        pair_code(1, 10, values="fp8")
