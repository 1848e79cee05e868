"""gather: the values at the indices, and nothing is written."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import (
    Arguments,
    Backend,
    BadCase,
    assert_same_bits,
    flat_tensors,
    index_sets,
    moved,
    positions,
)


@given(data=st.data())
def test_reads_what_take_takes_and_leaves_it(backend: Backend, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 120))
    before = data.draw(flat_tensors(numel))
    indices = data.draw(index_sets(numel)).to(backend.device)
    residual = before.to(backend.device, copy=True)
    values = backend.op("gather")(residual, indices)
    assert_same_bits(residual.cpu(), before)
    assert_same_bits(values.cpu(), backend.op("take")(residual, None, indices, [0, numel]).cpu())


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    indices = torch.arange(0, 300_000, 7, dtype=torch.int32)
    residual = torch.arange(300_000.0, device=backend.device)
    for count in (1, 2, 3):
        threads(count)
        values = backend.op("gather")(residual, indices.to(backend.device))
        assert_same_bits(values.cpu(), indices.float())


BAD_FOR_HOSTS: list[BadCase] = [
    ({"indices": positions(-1, 2)}, r"indices\[0\] = -1 is not in \[0, 5\)"),
    ({"indices": positions(0, 5)}, r"indices\[1\] = 5 is not in \[0, 5\)"),
    ({"indices": positions(3, 3)}, r"indices\[1\] = 3 is not above indices\[0\] = 3"),
]
BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(10)[::2]}, "residual .*contiguous"),
    ({"residual": torch.ones(5, 1)}, "residual has shape"),
    ({"indices": positions(0, 1, 2, 3)[::2]}, "indices .*contiguous"),
]
BAD_TYPES: list[BadCase] = [
    ({"residual": torch.ones(5).half()}, "residual is (float16|Half)"),
    ({"indices": torch.tensor([1, 2])}, "indices is (int64|Long)"),
]


def good() -> Arguments:
    """Arguments that work."""
    return {"residual": torch.ones(5), "indices": positions(1, 2)}


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_FOR_HOSTS + BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"indices": [1, 2]}, "indices is a list")]],
)
def test_bad_arguments_are_named(change: Arguments, message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"gather: .*({message})"):
        ops.gather(**good() | change)


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ringprune::gather: .*({message})"):
        torch.ops.ringprune.gather(**moved(good() | change, compiled.device))


@pytest.mark.parametrize(("change", "message"), BAD_FOR_HOSTS)
def test_every_backend_refuses_bad_indices_alike(host: Backend, change: Arguments, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ringprune::gather: {message}"):
        host.op("gather")(**good() | change)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.gather.default, tuple(good().values()))
