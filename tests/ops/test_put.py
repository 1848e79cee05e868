"""put: tensors are zero but at the indices, and the values are rounded to nearest even."""

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
    tensor_lists,
)


def definition(
    shapes_and_dtypes: list[tuple[torch.Size, torch.dtype]], indices: Tensor, values: Tensor
) -> list[Tensor]:
    """Entry by entry in Python; returns new tensors. Rounding is that of torch.Tensor.to."""
    outputs = []
    start = 0
    entries = dict(zip(indices.tolist(), values, strict=True))
    for shape, dtype in shapes_and_dtypes:
        numel = shape.numel()
        flat = torch.zeros(numel)
        for i in range(numel):
            flat[i] = entries.get(start + i, 0.0)
        outputs.append(flat.reshape(shape).to(dtype))
        start += numel
    return outputs


@given(data=st.data())
def test_matches_the_definition(backend: Backend, data: st.DataObject) -> None:
    outputs = data.draw(tensor_lists())
    indices = data.draw(index_sets(sum(output.numel() for output in outputs)))
    values = data.draw(flat_tensors(indices.numel()))
    expected = definition([(output.shape, output.dtype) for output in outputs], indices, values)
    outputs = [output.to(backend.device, copy=True) for output in outputs]
    backend.op("put")(outputs, indices.to(backend.device), values.to(backend.device))
    for output, wanted in zip(outputs, expected, strict=True):
        assert_same_bits(output.cpu(), wanted)


@pytest.mark.parametrize(
    ("dtype", "digits"), [pytest.param(torch.float16, 10, id="fp16"), pytest.param(torch.bfloat16, 7, id="bf16")]
)
def test_halfway_values_go_to_even(backend: Backend, dtype: torch.dtype, digits: int) -> None:
    unit = 2.0**-digits  # distance of neighbours above 1
    values = torch.tensor([1 + unit / 2, 1 + 3 * unit / 2, 1 + unit / 2 + 2.0**-23], device=backend.device)
    output = torch.ones(3, dtype=dtype, device=backend.device)
    backend.op("put")([output], positions(0, 1, 2).to(backend.device), values)
    assert output.tolist() == [1.0, 1 + 2 * unit, 1 + unit]


def test_no_tensors(backend: Backend) -> None:
    nothing = torch.empty(0, device=backend.device)
    backend.op("put")([], nothing.int(), nothing)


def test_no_tensors_have_no_positions(host: Backend) -> None:
    with pytest.raises(ConfigurationError, match=r"indices\[0\] = 0 is not in \[0, 0\)"):
        host.op("put")([], positions(0), torch.ones(1))


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    indices = torch.arange(0, 300_000, 7, dtype=torch.int32)
    expected = torch.zeros(300_000)
    expected[indices] = indices.float()
    for count in (1, 2, 3):
        threads(count)
        outputs = [torch.ones(n, device=backend.device) for n in (100_003, 0, 199_997)]
        backend.op("put")(outputs, indices.to(backend.device), indices.float().to(backend.device))
        assert_same_bits(torch.cat(outputs).cpu(), expected)


def test_large_outputs_go_past_the_caches(backend: Backend) -> None:
    """From about four million entries on; tensors start anywhere in a cache line."""
    numels, dtypes = [1_000_003, 7, 0, 3_300_001, 1_000], [torch.float32, torch.float32, torch.float32] * 2
    dtypes[4] = torch.bfloat16
    indices = torch.arange(0, sum(numels), 31, dtype=torch.int32)
    outputs = [torch.ones(n, dtype=d, device=backend.device) for n, d in zip(numels, dtypes, strict=False)]
    backend.op("put")(outputs, indices.to(backend.device), torch.full((len(indices),), 2.0, device=backend.device))
    expected = torch.zeros(sum(numels))
    expected[indices] = 2.0
    assert_same_bits(torch.cat([output.float() for output in outputs]).cpu(), expected)


BAD_INDICES: list[tuple[list[int], str]] = [
    ([-1, 2], r"indices\[0\] = -1 is not in \[0, 5\)"),
    ([0, 5], r"indices\[1\] = 5 is not in \[0, 5\)"),
    ([3, 3], r"indices\[1\] = 3 is not above indices\[0\] = 3; they must be strictly ascending"),
    ([3, 2], r"indices\[1\] = 2 is not above indices\[0\] = 3"),
]
BAD_FOR_HOSTS: list[BadCase] = [({"indices": positions(*indices)}, message) for indices, message in BAD_INDICES]
BAD_VALUES: list[BadCase] = [
    ({"outputs": [torch.ones(2), torch.ones(6)[::2]]}, r"outputs\[1\] .*contiguous"),
    ({"values": torch.ones(3)}, "values has 3 entries; 2 are needed"),
    ({"values": torch.ones(4)[::2]}, "values .*contiguous"),
    ({"indices": positions(1, 2)[:, None]}, "indices has shape|values"),
]
BAD_TYPES: list[BadCase] = [
    ({"outputs": [torch.ones(2), torch.ones(3).double()]}, r"outputs\[1\] is (float64|Double)"),
    ({"values": torch.ones(2).half()}, "values is (float16|Half)"),
    ({"indices": torch.tensor([1, 2])}, "indices is (int64|Long)"),
]
BAD_PYTHON_TYPES: list[BadCase] = [
    ({"outputs": torch.ones(5)}, "outputs is a Tensor"),
    ({"outputs": [torch.ones(2), 3]}, r"outputs\[1\] is a int"),
    ({"values": None}, "values is a NoneType"),
]


def good() -> Arguments:
    """Arguments that work: two tensors of 2 and 3 entries."""
    return {
        "outputs": [torch.ones(2), torch.ones(3)],
        "indices": positions(1, 2),
        "values": torch.tensor([5.0, 6.0]),
    }


def assert_nothing_written(arguments: Arguments) -> None:
    assert all(bool((output == 1).all()) for output in arguments["outputs"] if isinstance(output, torch.Tensor))


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_FOR_HOSTS + BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in BAD_TYPES + BAD_PYTHON_TYPES],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = good() | change
    with pytest.raises(error, match=f"put: .*({message})"):
        ops.put(**arguments)
    assert_nothing_written(arguments)


@pytest.mark.parametrize(("indices", "message"), BAD_INDICES)
def test_every_backend_refuses_bad_indices_alike(host: Backend, indices: list[int], message: str) -> None:
    outputs = [torch.ones(5, device=host.device)]
    with pytest.raises(ConfigurationError, match=f"ringprune::put: {message}"):
        host.op("put")(outputs, positions(*indices).to(host.device), torch.ones(len(indices), device=host.device))
    assert_nothing_written({"outputs": outputs})


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = moved(good() | change, compiled.device)
    with pytest.raises(error, match=f"ringprune::put: .*({message})"):
        torch.ops.ringprune.put(**arguments)
    assert_nothing_written(arguments)


def test_autograd_sees_the_write(backend: Backend) -> None:
    output = torch.ones(2, device=backend.device)
    version = output._version
    nothing = torch.empty(0, device=backend.device)
    backend.op("put")([output], nothing.int(), nothing)
    assert output._version > version
    assert output.tolist() == [0.0, 0.0]


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.put.default, tuple(good().values()))
