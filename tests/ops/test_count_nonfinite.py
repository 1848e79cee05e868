"""count_nonfinite: NaN and infinities of every dtype, counted exactly."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import FLOATS_AND_DOUBLE, Arguments, Backend, BadCase, assert_same_bits, fill, moved, tensor_lists


@given(data=st.data())
def test_counts_what_python_counts(backend: Backend, data: st.DataObject) -> None:
    tensors = data.draw(tensor_lists(FLOATS_AND_DOUBLE))
    counts = backend.op("count_nonfinite")([tensor.to(backend.device) for tensor in tensors])
    expected = [sum(not math.isfinite(x) for x in tensor.reshape(-1).tolist()) for tensor in tensors]
    assert_same_bits(counts.cpu(), torch.tensor(expected))


def test_large_float64_is_finite(backend: Backend) -> None:
    tensor = torch.tensor([1e300, -1e300, float("inf")], dtype=torch.float64, device=backend.device)
    assert backend.op("count_nonfinite")([tensor]).tolist() == [1]


@pytest.mark.parametrize("dtype", FLOATS_AND_DOUBLE)
@pytest.mark.parametrize("numel", [511, 512, 513, 1025, 300_000])
def test_blocks_and_threads_change_nothing(
    backend: Backend, threads: Callable[[int], None], numel: int, dtype: torch.dtype
) -> None:
    tensor = fill((numel,), dtype, "specials", numel)
    expected = (~tensor.isfinite()).sum().reshape(1)
    for count in (1, 2, 3):
        threads(count)
        assert_same_bits(backend.op("count_nonfinite")([tensor.to(backend.device)]).cpu(), expected)


def test_no_tensors_and_empty_tensors() -> None:
    assert ops.count_nonfinite([]).shape == (0,)
    assert ops.count_nonfinite([]).dtype == torch.int64
    assert ops.count_nonfinite([torch.empty(0), torch.tensor([float("nan")])]).tolist() == [0, 1]


BAD_VALUES: list[BadCase] = [({"tensors": [torch.ones(2), torch.ones(6)[::2]]}, r"tensors\[1\] .*contiguous")]
BAD_TYPES: list[BadCase] = [({"tensors": [torch.ones(2), torch.ones(3).int()]}, r"tensors\[1\] is (int32|Int)")]


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"tensors": torch.ones(2)}, "tensors is a Tensor")]],
)
def test_bad_arguments_are_named(arguments: Arguments, message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"count_nonfinite: .*({message})"):
        ops.count_nonfinite(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, arguments: Arguments, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ringprune::count_nonfinite: .*({message})"):
        torch.ops.ringprune.count_nonfinite(**moved(arguments, compiled.device))


def test_opcheck() -> None:
    tensors = [torch.ones(2, 3), torch.ones(0), torch.tensor([float("nan")])]
    torch.library.opcheck(torch.ops.ringprune.count_nonfinite.default, (tensors,))
