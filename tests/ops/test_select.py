"""select: exactly the largest scores, ties to the lowest position, whatever the scores are."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import Arguments, Backend, BadCase, assert_same_bits, flat_tensors, moved, offset_tables
from tests.ops.definitions import selected

INF, NAN = float("inf"), float("nan")


@given(data=st.data())
def test_selects_what_sorting_would(backend: Backend, data: st.DataObject) -> None:
    scores = data.draw(flat_tensors(data.draw(st.integers(0, 400))))
    offsets = data.draw(offset_tables(scores.numel()))
    counts = [data.draw(st.integers(0, end - start)) for start, end in pairwise(offsets)]
    indices = backend.op("select")(scores.to(backend.device), offsets, counts)
    assert_same_bits(indices.cpu(), selected(scores, offsets, counts))


@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), data=st.data())
def test_any_bits_are_ordered(backend: Backend, words: list[int], data: st.DataObject) -> None:
    scores = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    count = data.draw(st.integers(0, len(words)))
    indices = backend.op("select")(scores.to(backend.device), [0, len(words)], [count])
    assert_same_bits(indices.cpu(), selected(scores, [0, len(words)], [count]))


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        pytest.param([5.0, 5.0, 5.0, 5.0], 2, [0, 1], id="all ties"),
        pytest.param([0.0, 0.0, 0.0], 2, [-1, -1], id="all zeros"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0], 2, [1, 3], id="tie at the threshold"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0], 4, [1, 2, 3, 4], id="below the tie"),
        pytest.param([-0.0, 2.0, -0.0, 1.0], 3, [1, 3, -1], id="more than there are above zero"),
        pytest.param([-1.0, 3.0, -2.0, -INF], 2, [1, -1], id="negative"),
        pytest.param([INF, NAN, 1.0, -NAN, INF], 1, [1], id="NaN above infinity"),
        pytest.param([INF, NAN, 1.0, -NAN, INF], 3, [0, 1, 3], id="NaN of either sign, then infinity"),
        pytest.param([1e-45, 0.0, 2e-45, -1e-45], 2, [0, 2], id="denormals"),
        pytest.param([3e-45, 1e-45, 2e-45], 1, [0], id="largest denormal"),
        pytest.param([1.0, 2.0, 3.0], 3, [0, 1, 2], id="all"),
        pytest.param([1.0, 2.0, 3.0], 0, [], id="none"),
        pytest.param([7.0], 1, [0], id="one entry"),
    ],
)
def test_special_scores(backend: Backend, scores: list[float], count: int, expected: list[int]) -> None:
    indices = backend.op("select")(torch.tensor(scores, device=backend.device), [0, len(scores)], [count])
    assert indices.tolist() == expected


def test_no_tensors(backend: Backend) -> None:
    assert backend.op("select")(torch.empty(0, device=backend.device), [0], []).shape == (0,)


@pytest.mark.parametrize("style", ["random", "ties"])
def test_values_are_those_of_topk_at_any_thread_count(
    backend: Backend, threads: Callable[[int], None], style: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(300_000, generator=generator)
    scores = (scores * 50).round() if style == "ties" else scores
    offsets, counts = [0, 200_000, 200_000, 200_001, 300_000], [2_000, 0, 1, 50_000]
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(backend.op("select")(scores.to(backend.device), offsets, counts).cpu())
        assert_same_bits(results[-1], results[0])
    written = 0
    for (start, end), count in zip(pairwise(offsets), counts, strict=True):
        chosen = results[0][written : (written := written + count)]
        chosen = chosen[chosen != ops.PAD]
        assert_same_bits(scores[chosen].sort(descending=True).values, scores[start:end].topk(len(chosen)).values)


UNIT = 2.0**-23
ABOVE = {
    "one score": [2.0],
    "high digits": [2.0, 8.0, 2.0**100, INF],
    "middle digits": [1 + 2.0**-13 * i for i in range(1, 200)],
    "low digits": [1 + UNIT * i for i in range(1, 400)],
    "all digits": [1 + UNIT, 1 + 2.0**-10, 1 + 2.0**-10 + UNIT, 2.0, 2.0 + 4 * UNIT, NAN],
}
"""Scores above 1.0 that differ in the digits by which a threshold is read: 11, 11 and 9 bits of them."""


@pytest.mark.parametrize(
    ("above", "few"), [*((name, 2_500) for name in ABOVE), *(("all digits", few) for few in (2_001, 2_000, 1_999))]
)
def test_the_threshold_is_among_few_scores_above_many_equal_ones(
    backend: Backend, threads: Callable[[int], None], above: str, few: int
) -> None:
    """A hint lets all of the many through, and they are the guess, which is wrong: the digits are read."""
    generator = torch.Generator().manual_seed(few)
    scores, values, count = torch.ones(300_000), torch.tensor(ABOVE[above]), 2_000
    places = torch.randperm(300_000, generator=generator)[:few]
    scores[places] = values[torch.randint(len(values), (few,), generator=generator)]
    expected = torch.sort(scores, descending=True, stable=True).indices[:count].sort().values.int()
    for number in (1, 2, 3):
        threads(number)
        assert_same_bits(backend.op("select")(scores.to(backend.device), [0, 300_000], [count]).cpu(), expected)


BAD_VALUES: list[BadCase] = [
    ({"scores": torch.ones(5, 1)}, "scores has shape"),
    ({"scores": torch.ones(10)[::2]}, "scores .*contiguous"),
    ({"offsets": []}, "offsets"),
    ({"offsets": [0, 2, 4]}, "offsets .*0 to 5"),
    ({"offsets": [1, 2, 5]}, "offsets .*0 to 5"),
    ({"offsets": [0, 6, 5]}, r"offsets\[2\] = 5 is below .*offsets\[1\] = 6"),
    ({"offsets": [0, -1, 5]}, r"offsets\[1\] = -1 is below .*offsets\[0\] = 0"),
    ({"counts": [1]}, "counts has 1 values; 2 are needed"),
    ({"counts": [3, 0]}, r"counts\[0\] = 3; 0 to 2 is allowed, the entries of tensor 0"),
    ({"counts": [2, -1]}, r"counts\[1\] = -1; 0 to 3 is allowed, the entries of tensor 1"),
    ({"counts": [-(2**62), 2**62]}, r"counts\[0\]"),
]
BAD_TYPES: list[BadCase] = [({"scores": torch.ones(5).double()}, "scores is (float64|Double)")]
BAD_PYTHON_TYPES: list[BadCase] = [
    ({"scores": [1.0] * 5}, "scores is a list"),
    ({"offsets": torch.tensor([0, 2, 5])}, "offsets is a Tensor"),
    ({"offsets": [0, 2.0, 5]}, r"offsets\[1\] is a float; an int"),
    ({"counts": [1.0, 1]}, r"counts\[0\] is a float; an int"),
]


def good() -> Arguments:
    """Arguments that work: two tensors of 2 and 3 entries."""
    return {"scores": torch.ones(5), "offsets": [0, 2, 5], "counts": [1, 3]}


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in BAD_TYPES + BAD_PYTHON_TYPES],
)
def test_bad_arguments_are_named(change: Arguments, message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"select: .*({message})"):
        ops.select(**good() | change)


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ringprune::select: .*({message})"):
        torch.ops.ringprune.select(**moved(good() | change, compiled.device))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.select.default, tuple(good().values()))
