"""The product sends what docs/wire-format.md says: tests/wire/reader.py, made from that page alone, reads it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ringprune.ops import PAD
from ringprune.wire import INDEX_FORMATS, VALUE_FORMATS, index_code, pair_code
from tests.wire import reader
from tests.wire.test_indices import proposals
from tests.wire.test_pairs import pairs
from tests.wire.test_values import CODINGS, code_named, finite

INDEX_NUMBERS = {"list": 1, "bitmap": 2, "elias-fano": 3}
TWO_BOOKS = np.random.default_rng(2).normal(size=2055).astype(np.float32)


@pytest.mark.parametrize("coding", INDEX_FORMATS)
@given(proposal=proposals())
def test_positions_are_where_the_page_says(coding: str, proposal: tuple[Tensor, int, int]) -> None:
    positions, count, numel = proposal
    if coding == "bitmap":
        positions, numel = positions[positions < 10**6], min(numel, 10**6)
    message = bytes(index_code(count, numel, coding).encode(positions).numpy())
    assert reader.indices(message, count, numel) == [p for p in positions.tolist() if p != PAD]
    sizes = reader.index_bytes(count, numel)
    assert len(message) == (min(sizes.values()) if coding == "auto" else sizes[INDEX_NUMBERS[coding]])


@pytest.mark.parametrize("coding", CODINGS)
@given(values=finite)
@example(values=TWO_BOOKS)
def test_values_are_what_the_page_says(coding: str, values: np.ndarray) -> None:
    """To the bit what the product reads; and with what was dropped what was given."""
    code, rest = code_named(coding), torch.empty(values.size)
    message = code.encode(torch.from_numpy(values.copy()), rest)
    found = reader.values(bytes(message.numpy()), values.size)
    assert found.tobytes() == code.decode(message, torch.empty(values.size), name="m").numpy().tobytes()
    assert np.array_equal(found.astype(np.float64) + rest.double().numpy(), values.astype(np.float64))


@given(
    st.sampled_from(INDEX_FORMATS), st.sampled_from(VALUE_FORMATS), st.integers(1, 3000), st.data(), st.integers(0, 400)
)
def test_pairs_are_where_the_page_says(
    indices: str, values: str, numel: int, data: st.DataObject, expected: int
) -> None:
    count, expected = data.draw(st.integers(1, min(numel, 500))), min(expected, numel)
    places, given_values = pairs(count, numel, data.draw(st.integers(0, 2**32 - 1)))
    rest = np.empty_like(given_values)
    message = bytes(pair_code(expected, numel, indices, values).encode(places, given_values, rest).numpy())
    found_places, found = reader.pairs(message, count, expected, numel)
    assert found_places == places.tolist()
    assert np.array_equal(found.astype(np.float64) + rest, given_values.astype(np.float64))


# -- fixed messages of version 4, as little-endian machines send them; other bytes are another version ----------------

SMALL = [
    ("list", 3, 300, [3, 200], "5204010082003cd5 0200000000000000 03000000c8000000 0000000000000000"),
    ("bitmap", 2, 70, [0, 65], "520402008a6146b4 0200000000000000 0100000000000000 0200000000000000"),
    ("elias-fano", 5, 1000, [5, 30, 31, 999], "5204030066b130d7 0400000000000000 0700000004000000 c5ff030000000000"),
]
ROUNDED = [
    ("bf16", [1, -2.5, 0.1], [1, -2.5, 205 / 2048], "52041000020ddf77 803f20c0cd3d0000"),
    ("fp16", [1, -0.5, 3, 0.1], [1, -0.5, 3, 819 / 8192], "52041100acc47b79 0000003900000000 007000ec00766662"),
    (
        "int8",
        [1, -0.5, 0.25],
        [126 * 130 / 2**14, -63 * 130 / 2**14, 32 * 130 / 2**14],
        "52041200b6e3d408 023c000000000000 7ec1200000000000",
    ),
    ("int4", [7, -3, 1.4, -7, 2], [7, -3, 1, -7, 2], "52041300944615f1 803f000000000000 d791020000000000"),
]
BOOKS = [
    (
        "book4",
        [7, -8, 1],
        "52041400af3d1b0f 00c1e0c0c0c0a0c0 80c040c000c080bf 0000803f00404040 8040a040c040e040 0f09000000000000",
    ),
    ("book2", [2, -1, 0.5, 0, 0.5], "5204150080a3ba15 80bf0000003f0040 6302000000000000"),
]
PAIRS = [
    (
        *("bitmap", "fp32", 3, 100, [1, 64, 99], [1, -2, 0.5]),
        "52042200ff7d85df 0200000000000000 0100000008000000 0000803f000000c0 0000003f00000000",
    ),
    (
        *("elias-fano", "bf16", 4, 1000, [5, 30, 31, 100, 500, 501, 999], [1, -2, 3, -4, 5, -6, 7]),
        "5204230001065a49 4700180020000000 c57f42eb01000000 52041000f8806c06 803f00c0404080c0 a040c0c0e0400000",
    ),
]


@pytest.mark.parametrize(("coding", "count", "numel", "positions", "sent"), SMALL, ids=[each[0] for each in SMALL])
def test_a_small_proposal_is_these_bytes(coding: str, count: int, numel: int, positions: list[int], sent: str) -> None:
    message, code = bytes.fromhex(sent), index_code(count, numel, coding)
    assert bytes(code.encode(torch.tensor(positions, dtype=torch.int32)).numpy()) == message
    assert code.decode(as_tensor(message), name="m").tolist() == reader.indices(message, count, numel) == positions


@pytest.mark.parametrize(("coding", "values", "rounded", "sent"), ROUNDED, ids=[each[0] for each in ROUNDED])
def test_a_few_values_are_these_bytes(
    coding: str, values: Sequence[float], rounded: Sequence[float], sent: str
) -> None:
    message, count = bytes.fromhex(sent), len(values)
    assert bytes(code_named(coding).encode(torch.tensor(values), torch.empty(count)).numpy()) == message
    assert reader.values(message, count).tolist() == rounded
    assert code_named(coding).decode(as_tensor(message), torch.empty(count), name="m").tolist() == rounded


@pytest.mark.parametrize(("coding", "values", "sent"), BOOKS, ids=[each[0] for each in BOOKS])
def test_a_book_in_these_bytes_is_read(coding: str, values: Sequence[float], sent: str) -> None:
    """Which levels the product fits to values may change without another version."""
    message, into = bytes.fromhex(sent), torch.empty(len(values))
    assert reader.values(message, len(values)).tolist() == values
    assert code_named(coding).decode(as_tensor(message), into, name="m").tolist() == values


@pytest.mark.parametrize(
    ("indices", "coding", "expected", "numel", "places", "values", "sent"), PAIRS, ids=[each[1] for each in PAIRS]
)
def test_a_few_pairs_are_these_bytes(
    indices: str, coding: str, expected: int, numel: int, places: list[int], values: Sequence[float], sent: str
) -> None:
    message, code, count = bytes.fromhex(sent), pair_code(expected, numel, indices, coding), len(places)
    given_values = np.array(values, np.float32)
    encoded = code.encode(np.array(places, np.int32), given_values, np.empty_like(given_values))
    assert bytes(encoded.numpy()) == message
    for found in (reader.pairs(message, count, expected, numel), code.decode(as_tensor(message), count, name="m")):
        assert list(found[0]) == places and list(found[1]) == values


def as_tensor(message: bytes) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)
