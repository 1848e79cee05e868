"""accumulate_select: what does not fit is named, and nothing is written."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.ops import Hints
from tests.ops.cases import Arguments, Backend, BadCase, moved


def good() -> Arguments:
    """Arguments that work: three tensors of 2, 0 and 3 entries."""
    return {
        "grads": [torch.ones(2), torch.ones(0), torch.ones(3)],
        "residual": torch.ones(5),
        "velocity": torch.ones(5),
        "weights": [torch.ones(2), torch.ones(0), torch.ones(3)],
        "residual_out": torch.ones(5),
        "velocity_out": torch.ones(5),
        "factors": [1.0, 1.0, 1.0],
        "momentum": [0.9, 0.9, 0.9],
        "nesterov": [False, False, True],
        "score": "ratio",
        "parameters": [0.0, 0.1, 0.2],
        "counts": [1, 0, 2],
        "hints": Hints.none(3, torch.device("cpu")),
    }


def native_arguments(arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """As torch.ops takes them: hints and tally apart."""
    rest = dict(arguments)
    hints = rest.pop("hints")
    rest |= {"hints": hints.keys, "tally": hints.tally}
    return tuple(rest.pop(name) for name in ("grads", "residual", "velocity", "weights")), rest


MEMORY = torch.ones(16)
BAD_VALUES: list[BadCase] = [
    ({"residual": torch.ones(4)}, "5 entries together; 4 are needed|residual has 4 entries; 5 are needed"),
    ({"velocity": None}, "velocity and velocity_out must both be"),
    ({"factors": [1.0]}, "factors has 1 values; 3 are needed"),
    ({"residual_out": MEMORY[:5], "residual": MEMORY[2:7]}, "residual_out shares memory with residual"),
    ({"weights": [torch.ones(2), torch.ones(3), torch.ones(0)]}, r"weights.*entries|weights have other sizes"),
    ({"weights": [torch.ones(2), torch.ones(3)]}, "weights has 2 values|weights have other sizes|weights.1. has"),
    ({"weights": [torch.ones(2), torch.ones(0), torch.ones(6)[::2]]}, r"weights\[2\] .*contiguous"),
    ({"parameters": [0.0]}, "parameters has 1 values; 3 are needed"),
    ({"score": "saliency"}, "score is 'saliency'"),
    ({"counts": [1, 0]}, "counts has 2 values; 3 are needed"),
    ({"counts": [3, 0, 1]}, r"counts\[0\] = 3; 0 to 2 is allowed"),
    ({"counts": [1, 1, 1]}, r"counts\[1\] = 1; 0 to 0 is allowed"),
    ({"counts": [1, 0, -1]}, r"counts\[2\] = -1; 0 to 3 is allowed"),
    ({"hints": Hints.none(2, torch.device("cpu"))}, "hints.* has 4 entries; 6 are needed"),
    ({"hints": Hints(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))}, "tally has 3 entries"),
]
BAD_NATIVE_VALUES: list[BadCase] = [
    (
        {"residual_out": MEMORY[:5], "weights": [torch.ones(2), torch.ones(0), MEMORY[3:6]]},
        r"residual_out shares memory with weights\[2\]",
    ),
    (
        {"velocity_out": MEMORY[:5], "weights": [torch.ones(2), torch.ones(0), MEMORY[3:6]]},
        r"velocity_out shares memory with weights\[2\]",
    ),
]
BAD_FOR_PYTHON: list[BadCase] = [({"parameters": [0.0, -1.0, 0.0]}, r"parameters\[1\] = -1")]
BAD_TYPES: list[BadCase] = [
    ({"weights": [torch.ones(2), torch.ones(0), torch.ones(3).double()]}, r"weights\[2\] is (float64|Double)"),
    ({"grads": [torch.ones(2), torch.ones(0), torch.ones(3).int()]}, r"grads\[2\] is (int32|Int)"),
    ({"hints": Hints(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))}, "hints.* is (float32|Float)"),
]


def assert_nothing_written(arguments: Arguments) -> None:
    for name in ("residual", "velocity", "residual_out", "velocity_out"):
        assert arguments[name] is None or bool((arguments[name] == 1.0).all()), name


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES + BAD_FOR_PYTHON]
    + [(*case, ArgumentTypeError) for case in BAD_TYPES],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    MEMORY.fill_(1.0)
    arguments = good() | change
    with pytest.raises(error, match=f"accumulate_select: .*({message})"):
        ops.accumulate_select(**arguments)
    assert_nothing_written(arguments)


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES + BAD_NATIVE_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    MEMORY.fill_(1.0)
    arguments = good() | change
    positional, named = native_arguments(arguments)
    named = moved(named | {"positional": list(positional)}, compiled.device)
    positional = named.pop("positional")
    with pytest.raises(error, match=f"ringprune::accumulate_select: .*({message})"):
        torch.ops.ringprune.accumulate_select(*positional, **named)
    assert_nothing_written(named | {"residual": positional[1], "velocity": positional[2]})


def test_more_entries_than_positions_are_refused() -> None:
    with FakeTensorMode():
        flat = torch.empty(2**31)
        with pytest.raises(ConfigurationError, match="2147483648 entries together; at most 2147483647"):
            ops.select(flat, [0, 2**31], [1])
        with pytest.raises(ConfigurationError, match="2147483648 entries together; at most 2147483647"):
            ops.accumulate_select(
                **good()
                | {"grads": [flat], "weights": [flat], "velocity": None, "velocity_out": None, "counts": [1]}
                | {name: [1.0] for name in ("factors", "momentum", "parameters")}
                | {name: torch.empty(2**31) for name in ("residual", "residual_out")}
                | {"nesterov": [False], "hints": Hints.none(1, torch.device("cpu"))}
            )


def test_kernels_refuse_more_entries_than_positions(compiled: Backend) -> None:
    """The tensors are as large as they say, but their memory is never touched."""
    if compiled.device != "cpu":
        pytest.skip("a device gives memory at once")
    n = 2**31
    flat, narrow = torch.empty(n), torch.empty(n, dtype=torch.float16)
    message = "2147483648 entries together; at most 2147483647 are allowed, for positions are int32"
    one = torch.zeros(1, dtype=torch.int32)
    hints = Hints.none(1, torch.device("cpu"))
    calls = {
        "select": lambda op: op(flat, [0, n], [1]),
        "take": lambda op: op(flat, None, one, [0, n]),
        "put": lambda op: op([narrow], one, torch.zeros(1)),
        "accumulate_select": lambda op: op(
            [narrow],
            flat,
            None,
            [narrow],
            residual_out=flat,
            velocity_out=None,
            factors=[1.0],
            momentum=[0.0],
            nesterov=[False],
            score="ratio",
            parameters=[0.0],
            counts=[1],
            hints=hints.keys,
            tally=hints.tally,
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"ringprune::{name}: {message}"):
            call(getattr(torch.ops.ringprune, name))


def test_autograd_sees_the_write(backend: Backend) -> None:
    residual = torch.ones(2, device=backend.device)
    hints = Hints.none(1, torch.device(backend.device))
    versions = residual._version, hints.tally._version, hints.keys._version
    ops.accumulate_select(
        [residual.clone()],
        residual,
        None,
        [residual.clone()],
        residual_out=residual,
        velocity_out=None,
        factors=[1.0],
        momentum=[0.0],
        nesterov=[False],
        score="ratio",
        parameters=[0.0],
        counts=[1],
        hints=hints,
    )
    assert residual._version > versions[0]
    assert hints.tally._version > versions[1]
    if backend.name != "reference":
        assert hints.keys._version > versions[2]


@pytest.mark.parametrize("with_velocity", [True, False])
def test_opcheck(with_velocity: bool) -> None:
    arguments = good()
    if not with_velocity:
        arguments |= {"velocity": None, "velocity_out": None}
    torch.library.opcheck(torch.ops.ringprune.accumulate_select.default, *native_arguments(arguments))
