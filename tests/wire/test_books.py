"""Books of levels are near the best there are, and what they do with blocks of every kind is defined."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from ringprune.ops import BOOK_BLOCK as BLOCK
from ringprune.wire import ValueCode
from tests.documents import ROOT
from tests.wire.test_values import code_named, round_trip

BOOKS = {"book4": 16, "book2": 4}
COUNT = 40 * BLOCK

any_values = arrays(
    np.float32,
    st.one_of(st.integers(0, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1])),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def draw(distribution: str) -> Tensor:
    """Values of a distribution: all of them, or the twentieth of most magnitude, as selection sends them."""
    generator = torch.Generator().manual_seed(3)
    total = 20 * COUNT if distribution.endswith("largest") else COUNT
    values = torch.randn(total, generator=generator)
    if distribution.startswith("Laplace"):
        values = values.sign() * -torch.log1p(-torch.rand(total, generator=generator))
    return values if total == COUNT else values[values.abs().topk(COUNT).indices.sort().values]


def error(code: ValueCode, values: Tensor) -> float:
    """Mean square of what is dropped."""
    return float(round_trip(code, values)[1].double().square().mean())


def error_of_int2(values: Tensor) -> float:
    """What ``int4``'s rule would drop with two bits: multiples -1, 0 and 1 of the largest of 256 values."""
    blocks = values[: values.numel() // 256 * 256].double().view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True)
    return float((blocks - (blocks / scale).round() * scale).square().mean())


def said(distribution: str) -> dict[str, str]:
    """The row of a distribution in the table of docs/wire-format.md, by the names of its columns."""
    lines = (ROOT / "docs" / "wire-format.md").read_text().splitlines()
    rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in lines if line.count("|") == 9]
    [head] = [row for row in rows if row[-1] == "ratio"]
    [row] = [row for row in rows if row[0] == distribution]
    names = [*head[1:4], "ratio to int4", *head[5:7], "ratio to int2"]
    return dict(zip(names, row[1:], strict=True))


@pytest.mark.parametrize("distribution", ["Gaussian", "Laplace", "Gaussian, largest", "Laplace, largest"])
def test_a_book_drops_what_the_page_says(distribution: str) -> None:
    """To 5 %, or as far as the page's digits go."""
    values = draw(distribution)
    square = float(values.double().square().mean())
    found = {name: error(code_named(name), values) / square for name in ("int8", "int4", "book4", "book2")}
    found["int2"] = error_of_int2(values) / square
    found |= {"ratio to int4": found["book4"] / found["int4"], "ratio to int2": found["book2"] / found["int2"]}
    for name, text in said(distribution).items():
        half_a_digit = 0.5 * 10.0 ** -len(text.partition(".")[2])
        assert found[name] == pytest.approx(float(text), rel=0.05, abs=half_a_digit), name


@pytest.mark.parametrize(
    ("distribution", "coding", "optimum", "more"),
    [
        ("Gaussian", "book4", 0.009497, 1.05),
        ("Gaussian", "book2", 0.1175, 1.15),
        ("Laplace", "book4", 0.01544, 1.05),
        ("Laplace", "book2", 0.1765, 1.15),
    ],
)
def test_books_are_near_the_best_for_a_known_distribution(
    distribution: str, coding: str, optimum: float, more: float
) -> None:
    """The optima are those of J. Max (1960), and of Paez and Glisson (1972); they need no level at zero."""
    values = draw(distribution)
    assert error(code_named(coding), values) <= more * optimum * float(values.double().square().mean())


@pytest.mark.parametrize("coding", BOOKS)
@given(values=any_values)
def test_a_level_has_the_sign_of_its_value_and_is_at_most_twice_as_large(coding: str, values: np.ndarray) -> None:
    """So nothing is lost, whatever the values; also where they are huge."""
    tensor = torch.from_numpy(values.copy())
    decoded, rest = round_trip(code_named(coding), tensor)
    assert torch.equal(decoded.double() + rest.double(), tensor.double())
    assert bool((decoded.double() * tensor.sign() >= 0).all())
    assert bool((decoded.double().abs() <= 2 * tensor.double().abs()).all())


@pytest.mark.parametrize("coding", BOOKS)
@pytest.mark.parametrize("count", [1, 2, 5, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("value", [1.0, -0.375, 2.0**-100, -(2.0**127), 3.0e-5, 0.1, 0.0, -0.0])
def test_a_constant_comes_back(coding: str, count: int, value: float) -> None:
    """To the bit where bfloat16 can hold it, otherwise to within half a unit of it, or one below a power of two."""
    values = torch.full((count,), value)
    decoded, rest = round_trip(code_named(coding), values)
    if bool((values.bfloat16().float() == values).all()):
        assert torch.equal(decoded, values) and not rest.any()
    assert bool((rest.abs() <= 2.0**-8 * values.abs()).all())


@pytest.mark.parametrize("coding", BOOKS)
def test_few_values_far_apart_come_back(coding: str) -> None:
    """Signs with zeros between them, as of a gradient that is nearly empty."""
    values = torch.zeros(BLOCK)
    values[::50], values[1::50] = 0.5, -0.5
    decoded, rest = round_trip(code_named(coding), values)
    assert torch.equal(decoded, values) and not rest.any()


@pytest.mark.parametrize("coding", BOOKS)
@given(seed=st.integers(0, 2**32 - 1), zeros=st.floats(0.01, 0.99))
def test_zero_stays_zero(coding: str, seed: int, zeros: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(BLOCK, generator=generator) * (torch.rand(BLOCK, generator=generator) > zeros)
    decoded, _ = round_trip(code_named(coding), values)
    assert not decoded[values == 0].any()


@pytest.mark.parametrize("coding", BOOKS)
def test_blocks_are_coded_apart(coding: str) -> None:
    """Each block's book and codes are those it gets alone: layers of other scales do not meet but at a border."""
    code, generator = code_named(coding), torch.Generator().manual_seed(1)
    blocks = [torch.randn(BLOCK, generator=generator) * scale for scale in (1e-6, 1.0, 1e6)]
    together = round_trip(code, torch.cat(blocks))
    for place, block in enumerate(blocks):
        part = slice(place * BLOCK, (place + 1) * BLOCK)
        for whole, alone in zip(together, round_trip(code, block), strict=True):
            assert torch.equal(whole[part], alone)


@pytest.mark.parametrize("coding", BOOKS)
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_on_every_rank_and_others_are_not(coding: str, strange: float) -> None:
    """Its rest too: a step with such values is not made."""
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    values[BLOCK + 5] = strange
    for found in round_trip(code_named(coding), values):
        assert [int(part.isnan().sum()) for part in found.split(BLOCK)] == [0, BLOCK, 0]
        assert bool(found[:BLOCK].isfinite().all())


@pytest.mark.parametrize("coding", BOOKS)
def test_values_too_small_to_divide_wait(coding: str) -> None:
    values = torch.tensor([2.0**-103.5, -(2.0**-140), 0.0])
    decoded, rest = round_trip(code_named(coding), values)
    assert not decoded.any() and torch.equal(rest, values)
