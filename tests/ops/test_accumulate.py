"""accumulate: rounding by rounding as documented, in place or not, and nothing written on bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import Arguments, Backend, BadCase, assert_same_bits, flat_tensors, moved, tensor_lists
from tests.ops.definitions import accumulated


def run(
    backend: Backend,
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    *,
    in_place: bool,
    **numbers: list[Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the op on copies on the backend's device; returns (residual_out, velocity_out)."""
    grads = [grad.to(backend.device) for grad in grads]
    residual = residual.to(backend.device, copy=True)
    velocity = None if velocity is None else velocity.to(backend.device, copy=True)
    residual_out, velocity_out = residual, velocity
    if not in_place:
        residual_out = torch.full_like(residual, 7.0)
        velocity_out = None if velocity is None else torch.full_like(velocity, 7.0)
    before = (residual.clone(), None if velocity is None else velocity.clone())
    backend.op("accumulate")(grads, residual, velocity, residual_out=residual_out, velocity_out=velocity_out, **numbers)
    if not in_place:
        assert_same_bits(residual, before[0])
        if velocity is not None:
            assert_same_bits(velocity, before[1])
    return residual_out, velocity_out


@given(data=st.data())
def test_bits_are_those_of_the_formula(backend: Backend, data: st.DataObject) -> None:
    grads = data.draw(tensor_lists())
    numel = sum(grad.numel() for grad in grads)
    residual = data.draw(flat_tensors(numel))
    velocity = data.draw(st.none() | flat_tensors(numel))
    several = {"min_size": len(grads), "max_size": len(grads)}
    numbers = {
        "factors": data.draw(st.lists(st.sampled_from([1.0, 0.1, 1 / 3, 0.0, -2.5, 1e30]), **several)),
        "momentum": data.draw(st.lists(st.sampled_from([0.9, 0.0, 0.99, 1.0, 1 / 3]), **several)),
        "nesterov": data.draw(st.lists(st.booleans(), **several)),
    }
    expected = accumulated(grads, residual, velocity, **numbers)
    for in_place in (True, False):
        result = run(backend, grads, residual, velocity, in_place=in_place, **numbers)
        assert_same_bits(result[0].cpu(), expected[0])
        if velocity is not None:
            assert_same_bits(result[1].cpu(), expected[1])


def test_no_fused_multiply_add(backend: Backend) -> None:
    # m * v = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused multiply-add would keep the 2^-24.
    m = 1 + 2.0**-12
    velocity = torch.tensor([m], device=backend.device)
    residual = torch.zeros_like(velocity)
    grads = [torch.tensor([-(1 + 2.0**-11)], device=backend.device)]
    backend.op("accumulate")(
        grads,
        residual,
        velocity,
        residual_out=residual,
        velocity_out=velocity,
        factors=[1.0],
        momentum=[m],
        nesterov=[False],
    )
    assert velocity.item() == 0.0
    assert residual.item() == 0.0


def test_thread_count_changes_nothing(backend: Backend, threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator) for n in (100_003, 7, 0, 150_001)]
    residual = torch.randn(250_011, generator=generator)
    numbers = {"factors": [1.0, 0.5, 1.0, 0.1], "momentum": [0.9] * 4, "nesterov": [True, False, True, False]}
    expected = accumulated(grads, residual, residual, **numbers)
    for count in (1, 2, 3):
        threads(count)
        result = run(backend, grads, residual, residual, in_place=True, **numbers)
        assert_same_bits(result[0].cpu(), expected[0])
        assert_same_bits(result[1].cpu(), expected[1])


def test_no_tensors(backend: Backend) -> None:
    empty = torch.empty(0, device=backend.device)
    backend.op("accumulate")(
        [], empty, None, residual_out=empty, velocity_out=None, factors=[], momentum=[], nesterov=[]
    )


def good() -> Arguments:
    """Arguments that work: three tensors of 2, 0 and 3 entries."""
    return {
        "grads": [torch.ones(2), torch.ones(0), torch.ones(3)],
        "residual": torch.ones(5),
        "velocity": torch.ones(5),
        "residual_out": torch.ones(5),
        "velocity_out": torch.ones(5),
        "factors": [1.0, 1.0, 1.0],
        "momentum": [0.9, 0.9, 0.9],
        "nesterov": [False, False, True],
    }


MEMORY = torch.ones(16)
BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(4)}, "5 entries together; 4 are needed|residual has 4 entries; 5 are needed"),
    ({"residual": torch.ones(1, 5)}, "residual has shape"),
    ({"residual": torch.ones(10)[::2]}, "residual .*contiguous"),
    ({"velocity": torch.ones(6)}, "velocity has 6 entries; 5 are needed"),
    ({"velocity_out": torch.ones(4)}, "velocity_out has 4 entries; 5 are needed"),
    ({"residual_out": torch.ones(6)}, "residual_out has 6 entries; 5 are needed"),
    ({"grads": [torch.ones(2), torch.ones(0), torch.ones(6)[::2]]}, r"grads\[2\] .*contiguous"),
    ({"velocity": None}, "velocity and velocity_out must both be"),
    ({"velocity_out": None}, "velocity and velocity_out must both be"),
    ({"factors": [1.0, 1.0]}, "factors has 2 values; 3 are needed"),
    ({"momentum": [0.9] * 4}, "momentum has 4 values; 3 are needed"),
    ({"nesterov": []}, "nesterov has 0 values; 3 are needed"),
    ({"residual": MEMORY[:5], "residual_out": MEMORY[2:7]}, "residual_out shares memory with residual"),
    ({"velocity": MEMORY[:5], "velocity_out": MEMORY[4:9]}, "velocity_out shares memory with velocity"),
    ({"residual_out": MEMORY[:5], "velocity": MEMORY[:5]}, "residual_out shares memory with velocity"),
    ({"residual_out": MEMORY[:5], "velocity_out": MEMORY[:5]}, "residual_out shares memory with velocity_out"),
    ({"residual": MEMORY[:5], "velocity_out": MEMORY[:5]}, "velocity_out shares memory with residual"),
    (
        {"residual_out": MEMORY[:5], "grads": [torch.ones(2), torch.ones(0), MEMORY[3:6]]},
        r"shares memory with grads\[2\]",
    ),
]
BAD_FOR_PYTHON: list[BadCase] = [
    ({"grads": [torch.ones(2), torch.ones(0), torch.ones(3).to_sparse()]}, r"grads\[2\] .*contiguous"),
    ({"factors": [1.0, float("nan"), 1.0]}, r"factors\[1\] = nan"),
    ({"factors": [1.0, 1.0, 1e39]}, r"factors\[2\] = 1e\+39"),
    ({"momentum": [float("inf"), 1.0, 1.0]}, r"momentum\[0\] = inf"),
]
BAD_TYPES: list[BadCase] = [
    ({"residual": torch.ones(5, dtype=torch.float64)}, "residual is (float64|Double)"),
    ({"velocity": torch.ones(5).half()}, "velocity is (float16|Half)"),
    ({"grads": [torch.ones(2), torch.ones(0).double(), torch.ones(3)]}, r"grads\[1\] is (float64|Double)"),
    ({"grads": [torch.ones(2), torch.ones(0), torch.ones(3).int()]}, r"grads\[2\] is (int32|Int)"),
]
BAD_PYTHON_TYPES: list[BadCase] = [
    ({"residual": None}, "residual is a NoneType"),
    ({"grads": torch.ones(5)}, "grads is a Tensor; a list of tensors"),
    ({"grads": [torch.ones(2), None, torch.ones(3)]}, r"grads\[1\] is a NoneType"),
    ({"factors": torch.ones(3)}, "factors is a Tensor"),
    ({"factors": [1.0, "2", 1.0]}, r"factors\[1\] is a str"),
    ({"nesterov": [True, "no", False]}, r"nesterov\[1\] is a str; a bool"),
]


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES + BAD_FOR_PYTHON]
    + [(*case, ArgumentTypeError) for case in BAD_TYPES + BAD_PYTHON_TYPES],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    MEMORY.fill_(1.0)
    arguments = good() | change
    with pytest.raises(error, match=f"accumulate: .*({message})"):
        ops.accumulate(**arguments)
    for name in ("residual", "velocity", "residual_out", "velocity_out"):
        assert arguments[name] is None or bool((arguments[name].to_dense() == 1.0).all()), name


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    MEMORY.fill_(1.0)
    arguments = moved(good() | change, compiled.device)
    with pytest.raises(error, match=f"ringprune::accumulate: .*({message})"):
        torch.ops.ringprune.accumulate(**arguments)
    for name in ("residual", "velocity", "residual_out", "velocity_out"):
        assert arguments[name] is None or bool((arguments[name] == 1.0).all()), name


def test_autograd_sees_the_write(backend: Backend) -> None:
    residual = torch.ones(2, device=backend.device)
    version = residual._version
    backend.op("accumulate")(
        [residual.clone()],
        residual,
        None,
        residual_out=residual,
        velocity_out=None,
        factors=[1.0],
        momentum=[0.0],
        nesterov=[False],
    )
    assert residual._version > version


@pytest.mark.parametrize("with_velocity", [True, False])
def test_opcheck(with_velocity: bool) -> None:
    arguments = good()
    if not with_velocity:
        arguments |= {"velocity": None, "velocity_out": None}
    positional = [arguments.pop(name) for name in ("grads", "residual", "velocity")]
    torch.library.opcheck(torch.ops.ringprune.accumulate.default, positional, arguments)


def test_opcheck_in_place() -> None:
    arguments = good()
    arguments |= {"residual_out": arguments["residual"], "velocity_out": arguments["velocity"]}
    positional = [arguments.pop(name) for name in ("grads", "residual", "velocity")]
    torch.library.opcheck(torch.ops.ringprune.accumulate.default, positional, arguments)
