"""take: the values at the indices leave the residual, velocity is masked but where a tensor is sent whole."""

from collections.abc import Callable
from itertools import pairwise

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
    offset_tables,
    positions,
)


def definition(
    residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: list[int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Entry by entry in Python; returns (values, residual, velocity) as new tensors."""
    residual, velocity = residual.clone(), None if velocity is None else velocity.clone()
    values = torch.tensor([residual[i] for i in indices.tolist()], dtype=torch.float32)
    for start, end in pairwise(offsets):
        inside = [i for i in indices.tolist() if start <= i < end]
        residual[inside] = 0.0
        if velocity is not None and len(inside) < end - start:
            velocity[inside] = 0.0
    return values, residual, velocity


@given(data=st.data())
def test_matches_the_definition(backend: Backend, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 120))
    residual = data.draw(flat_tensors(numel))
    velocity = data.draw(st.none() | flat_tensors(numel))
    offsets = data.draw(offset_tables(numel))
    indices = data.draw(index_sets(numel))
    for start, end in pairwise(offsets):  # some tensors whole
        if data.draw(st.booleans()):
            indices = torch.cat([indices, torch.arange(start, end).int()]).unique()
    expected = definition(residual, velocity, indices, offsets)
    residual = residual.to(backend.device, copy=True)
    velocity = None if velocity is None else velocity.to(backend.device, copy=True)
    values = backend.op("take")(residual, velocity, indices.to(backend.device), offsets)
    assert_same_bits(values.cpu(), expected[0])
    assert_same_bits(residual.cpu(), expected[1])
    if velocity is not None:
        assert_same_bits(velocity.cpu(), expected[2])


def test_no_tensors(backend: Backend) -> None:
    empty = torch.empty(0, device=backend.device)
    assert backend.op("take")(empty, empty.clone(), empty.int(), [0]).shape == (0,)


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    numel, offsets = 300_000, [0, 100_000, 200_000, 300_000]
    parts = [torch.arange(0, 100_000, 3), torch.arange(100_000, 200_000), torch.arange(200_000, numel, 2)]
    indices = torch.cat(parts).int()
    for count in (1, 2, 3):
        threads(count)
        residual = torch.arange(1.0, numel + 1, device=backend.device)
        velocity = residual.clone()
        values = backend.op("take")(residual, velocity, indices.to(backend.device), offsets)
        assert_same_bits(values.cpu(), indices + 1.0)
        kept = torch.ones(numel, dtype=torch.bool)
        kept[indices] = False
        assert_same_bits(residual.cpu(), torch.where(kept, torch.arange(1.0, numel + 1), 0.0))
        kept[100_000:200_000] = True
        assert_same_bits(velocity.cpu(), torch.where(kept, torch.arange(1.0, numel + 1), 0.0))


BAD_INDICES: list[tuple[list[int], str]] = [
    ([-1, 2], r"indices\[0\] = -1 is not in \[0, 5\)"),
    ([0, 5], r"indices\[1\] = 5 is not in \[0, 5\)"),
    ([0, 2**31 - 1], r"indices\[1\] = 2147483647 is not in \[0, 5\)"),
    ([1, 3, 3], r"indices\[2\] = 3 is not above indices\[1\] = 3; they must be strictly ascending"),
    ([1, 3, 2, 9], r"indices\[2\] = 2 is not above indices\[1\] = 3"),
    ([4, 0, 1, 2, 3, 4, 4], r"indices\[1\] = 0 is not above indices\[0\] = 4"),
]
BAD_FOR_HOSTS: list[BadCase] = [({"indices": positions(*indices)}, message) for indices, message in BAD_INDICES]
BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(10)[::2]}, "residual .*contiguous"),
    ({"residual": torch.ones(5, 1)}, "residual has shape"),
    ({"velocity": torch.ones(4)}, "velocity has 4 entries; 5 are needed"),
    ({"indices": positions(1, 2)[:, None]}, "indices has shape"),
    ({"indices": positions(0, 1, 2, 3)[::2]}, "indices .*contiguous"),
    ({"offsets": [0, 2, 4]}, "offsets .*0 to 5"),
    ({"offsets": [0, 6, 5]}, r"offsets\[2\] = 5 is below"),
    ({"offsets": []}, "offsets"),
]
BAD_TYPES: list[BadCase] = [
    ({"residual": torch.ones(5).half()}, "residual is (float16|Half)"),
    ({"velocity": torch.ones(5).double()}, "velocity is (float64|Double)"),
    ({"indices": torch.tensor([1, 2])}, "indices is (int64|Long)"),
]


def good() -> Arguments:
    """Arguments that work: two tensors of 2 and 3 entries."""
    return {
        "residual": torch.ones(5),
        "velocity": torch.ones(5),
        "indices": positions(1, 2),
        "offsets": [0, 2, 5],
    }


def assert_nothing_written(arguments: Arguments) -> None:
    assert bool((arguments["residual"] == 1.0).all())
    assert bool((arguments["velocity"] == 1.0).all())


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_FOR_HOSTS + BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"indices": [1, 2]}, "indices is a list")]],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = good() | change
    with pytest.raises(error, match=f"take: .*({message})"):
        ops.take(**arguments)
    assert_nothing_written(arguments)


@pytest.mark.parametrize(("indices", "message"), BAD_INDICES)
def test_every_backend_refuses_bad_indices_alike(host: Backend, indices: list[int], message: str) -> None:
    state = torch.ones(5, device=host.device)
    with pytest.raises(ConfigurationError, match=f"ringprune::take: {message}"):
        host.op("take")(state, None, positions(*indices).to(host.device), [0, 2, 5])
    assert bool((state == 1.0).all())


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = moved(good() | change, compiled.device)
    with pytest.raises(error, match=f"ringprune::take: .*({message})"):
        torch.ops.ringprune.take(**arguments)
    assert_nothing_written(arguments)


def test_first_bad_index_is_named_at_any_thread_count(host: Backend, threads: Callable[[int], None]) -> None:
    indices = torch.arange(300_000, dtype=torch.int32)
    indices[70_000] = 0
    indices[299_999] = -1
    for count in (1, 2, 3):
        threads(count)
        with pytest.raises(ConfigurationError, match=r"indices\[70000\] = 0 is not above indices\[69999\] = 69999"):
            host.op("take")(torch.ones(300_000, device=host.device), None, indices.to(host.device), [0, 300_000])


def test_autograd_sees_the_write(backend: Backend) -> None:
    residual, velocity = torch.ones(3, device=backend.device), torch.ones(3, device=backend.device)
    versions = residual._version, velocity._version
    backend.op("take")(residual, velocity, positions(1).to(backend.device), [0, 3])
    assert residual._version > versions[0]
    assert velocity._version > versions[1]


@pytest.mark.parametrize("velocity", [torch.ones(5), None])
def test_opcheck(velocity: Tensor | None) -> None:
    torch.library.opcheck(torch.ops.ringprune.take.default, tuple((good() | {"velocity": velocity}).values()))
