"""square_sum: one fixed tree of additions, so the same bits from everybody."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import FLOATS_AND_DOUBLE, Arguments, Backend, BadCase, assert_same_bits, moved, tensor_lists


def definition(values: list[float]) -> float:
    """The tree, top down: halves of the next power of two, the right one padded with zeros."""
    if len(values) <= 1:
        return values[0] * values[0] if values else 0.0
    half = 2 ** math.ceil(math.log2(len(values))) // 2
    return definition(values[:half]) + definition(values[half:])


@given(data=st.data())
def test_bits_are_those_of_the_tree(backend: Backend, data: st.DataObject) -> None:
    tensors = data.draw(tensor_lists(FLOATS_AND_DOUBLE))
    sums = backend.op("square_sum")([tensor.to(backend.device) for tensor in tensors])
    expected = [definition(tensor.double().reshape(-1).tolist()) for tensor in tensors]
    assert_same_bits(sums.cpu(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS_AND_DOUBLE)
@pytest.mark.parametrize("numel", [1023, 1024, 1025, 2047, 3 * 1024, 5 * 1024 + 1, 100_003])
def test_blocks_and_threads_change_nothing(
    backend: Backend, threads: Callable[[int], None], numel: int, dtype: torch.dtype
) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64).to(dtype)
    expected = torch.tensor([definition(tensor.double().tolist())], dtype=torch.float64)
    for count in (1, 2, 3):
        threads(count)
        assert_same_bits(backend.op("square_sum")([tensor.to(backend.device)]).cpu(), expected)


def test_order_matters_here(backend: Backend) -> None:
    # squares of 2^-54 vanish beside 1 one by one; four of them that meet first are 2^-52 and do not
    tensor = torch.tensor([1.0, 0, 0, 0] + [2.0**-27] * 4, dtype=torch.float64, device=backend.device)
    assert backend.op("square_sum")([tensor]).item() == 1.0 + 2.0**-52


def test_no_tensors_and_empty_tensors() -> None:
    assert ops.square_sum([]).shape == (0,)
    assert ops.square_sum([]).dtype == torch.float64
    assert ops.square_sum([torch.empty(0), torch.ones(2)]).tolist() == [0.0, 2.0]


BAD_VALUES: list[BadCase] = [({"tensors": [torch.ones(2), torch.ones(6)[::2]]}, r"tensors\[1\] .*contiguous")]
BAD_TYPES: list[BadCase] = [({"tensors": [torch.ones(2), torch.ones(3).int()]}, r"tensors\[1\] is (int32|Int)")]


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"tensors": torch.ones(2)}, "tensors is a Tensor")]],
)
def test_bad_arguments_are_named(arguments: Arguments, message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"square_sum: .*({message})"):
        ops.square_sum(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, arguments: Arguments, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ringprune::square_sum: .*({message})"):
        torch.ops.ringprune.square_sum(**moved(arguments, compiled.device))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.square_sum.default, ([torch.ones(2, 3), torch.ones(0), torch.ones(5)],))
