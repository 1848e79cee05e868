"""give_back: the residual becomes the values at the indices, and nothing else of it changes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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


def definition(residual: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Entry by entry in Python; a new tensor."""
    residual = residual.clone()
    for index, value in zip(indices.tolist(), values, strict=True):
        residual[index] = value
    return residual


@given(data=st.data())
def test_matches_the_definition(backend: Backend, data: st.DataObject) -> None:
    residual = data.draw(flat_tensors(data.draw(st.integers(0, 120))))
    indices = data.draw(index_sets(residual.numel()))
    values = data.draw(flat_tensors(indices.numel()))
    expected = definition(residual, indices, values)
    residual = residual.to(backend.device, copy=True)
    backend.op("give_back")(residual, indices.to(backend.device), values.to(backend.device))
    assert_same_bits(residual.cpu(), expected)


@given(data=st.data())
def test_what_was_taken_can_be_given_back(backend: Backend, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 120))
    before = data.draw(flat_tensors(numel)).to(backend.device)
    indices = data.draw(index_sets(numel)).to(backend.device)
    residual = before.clone()
    values = backend.op("take")(residual, None, indices, [0, numel])
    backend.op("give_back")(residual, indices, values)
    assert_same_bits(residual.cpu(), before.cpu())


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    indices = torch.arange(0, 300_000, 7, dtype=torch.int32)
    expected = torch.ones(300_000)
    expected[indices] = indices.float()
    for count in (1, 2, 3):
        threads(count)
        residual = torch.ones(300_000, device=backend.device)
        backend.op("give_back")(residual, indices.to(backend.device), indices.float().to(backend.device))
        assert_same_bits(residual.cpu(), expected)


BAD_FOR_HOSTS: list[BadCase] = [
    ({"indices": positions(-1, 2)}, r"indices\[0\] = -1 is not in \[0, 5\)"),
    ({"indices": positions(0, 5)}, r"indices\[1\] = 5 is not in \[0, 5\)"),
    ({"indices": positions(3, 3)}, r"indices\[1\] = 3 is not above indices\[0\] = 3"),
]
BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(10)[::2]}, "residual .*contiguous"),
    ({"residual": torch.ones(5, 1)}, "residual has shape"),
    ({"values": torch.ones(3)}, "values has 3 entries; 2 are needed"),
    ({"indices": positions(0, 1, 2, 3)[::2]}, "indices .*contiguous"),
]
BAD_TYPES: list[BadCase] = [
    ({"residual": torch.ones(5).half()}, "residual is (float16|Half)"),
    ({"values": torch.ones(2).double()}, "values is (float64|Double)"),
    ({"indices": torch.tensor([1, 2])}, "indices is (int64|Long)"),
]


def good() -> Arguments:
    """Arguments that work."""
    return {"residual": torch.ones(5), "indices": positions(1, 2), "values": torch.zeros(2)}


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_FOR_HOSTS + BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"indices": [1, 2]}, "indices is a list")]],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = good() | change
    with pytest.raises(error, match=f"give_back: .*({message})"):
        ops.give_back(**arguments)
    assert bool((arguments["residual"] == 1.0).all())


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = moved(good() | change, compiled.device)
    with pytest.raises(error, match=f"ringprune::give_back: .*({message})"):
        torch.ops.ringprune.give_back(**arguments)
    assert bool((arguments["residual"] == 1.0).all())


@pytest.mark.usefixtures("native")
def test_a_residual_in_the_memory_of_its_arguments_is_refused() -> None:
    room = torch.arange(8, dtype=torch.int32)
    residual = room.view(torch.float32)
    with pytest.raises(ConfigurationError, match="give_back: residual shares memory with indices"):
        ops.give_back(residual, room[1:3], torch.ones(2))
    with pytest.raises(ConfigurationError, match="give_back: residual shares memory with values"):
        ops.give_back(residual, positions(1, 2), residual[6:])
    assert room.tolist() == list(range(8))


def test_autograd_sees_the_write(backend: Backend) -> None:
    residual = torch.ones(3, device=backend.device)
    version = residual._version
    backend.op("give_back")(residual, positions(1).to(backend.device), torch.zeros(1, device=backend.device))
    assert residual._version > version


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.give_back.default, tuple(good().values()))
