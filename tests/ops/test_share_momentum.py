"""share_momentum: what has arrived gains what all ranks were faster by; what has not keeps its own."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from tests.ops.cases import (
    FLOATS,
    SEEDS,
    SHAPES,
    STYLES,
    Arguments,
    Backend,
    BadCase,
    assert_same_bits,
    fill,
    moved,
)

ADAMS = ("squares", "decays", "roots", "epsilons", "factors")
READ = ("averages", "weights", "owns", "squares")


def definition(arguments: Arguments, i: int) -> tuple[Tensor, Tensor]:
    """The formulas of the docstring in NumPy for tensor ``i``; new elapsed and momentum."""
    f = np.float32
    x, elapsed, weight, own = (
        arguments[name][i].reshape(-1).numpy() for name in ("averages", "elapsed", "weights", "owns")
    )
    momentum, t, keep = arguments["momenta"][i].reshape(-1), f(arguments["times"][i]), f(arguments["keeps"][i])
    with np.errstate(all="ignore"):  # NaN, infinity and a time of 0 are among the cases
        time = elapsed + f(arguments["intervals"][i])
        said, way = x / time, (weight - own) / t
        gap = said - keep * way
        if arguments["squares"]:
            square, decay, root, epsilon, factor = (arguments[name][i] for name in ADAMS)
            v, decayed = square.float().reshape(-1).numpy(), f(decay) * weight
            gap = (said - decayed) - keep * (way - decayed)
            gap = gap * (np.sqrt(v) / f(root) + f(epsilon)) * f(factor)
        arrived = np.full(x.shape, arguments["whole"][i]) | (x != 0)
        shifted = (float(keep) * momentum.float() + torch.from_numpy(gap)).to(momentum.dtype)
        new = torch.where(torch.from_numpy(arrived & (time > 0) & (t > 0)), shifted, momentum)
    return torch.from_numpy(np.where(arrived, f(0), time)), new


@st.composite
def cases(draw: st.DrawFn) -> Arguments:
    """One to four tensors of SGD or Adam; half of what was exchanged is zero."""
    adam, style = draw(st.booleans()), draw(st.sampled_from(STYLES))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))

    def tensors(dtypes: tuple[torch.dtype, ...] = (torch.float32,), share: float = 1.0) -> list[Tensor]:
        some = [fill(shape, draw(st.sampled_from(dtypes)), style, draw(SEEDS)) for shape in shapes]
        return [x * (fill(x.shape, torch.float32, "normal", draw(SEEDS)).abs() < share) for x in some]

    def numbers(*some: float) -> list[float]:
        return [draw(st.sampled_from(some)) for _ in shapes]

    arguments: Arguments = {
        "averages": tensors(share=0.7),
        "elapsed": tensors(),
        "momenta": tensors(FLOATS),
        "weights": tensors(),
        "owns": [x.reshape(-1) for x in tensors()],  # only the number of entries counts
        "intervals": numbers(0.1, 0.0, 1e-3, 30.0),
        "times": numbers(0.1, 0.0, 1e-3, 30.0),
        "keeps": numbers(1.0, 0.0, 0.3),
        "whole": [draw(st.booleans()) for _ in shapes],
    }
    given = (tensors(FLOATS), numbers(0.0, 0.01), numbers(0.03, 0.7, 1.0), numbers(1e-8, 0.0), numbers(0.1))
    return arguments | {name: values if adam else [] for name, values in zip(ADAMS, given, strict=True)}


def run(backend: Backend, arguments: Arguments) -> Arguments:
    """Call on copies; what they are afterwards, on the CPU."""
    copies = {name: [x.clone() if isinstance(x, Tensor) else x for x in arguments[name]] for name in arguments}
    copies = moved(copies, backend.device)
    adams = {name: copies[name] for name in ADAMS}
    rest = {name: value for name, value in copies.items() if name not in ADAMS}
    if backend.name == "reference":
        backend.op("share_momentum")(**rest, **adams)
    else:
        backend.op("share_momentum")(**rest, adams=ops.Adams(**adams))
    return moved(copies, "cpu") if backend.device == "cpu" else {name: _cpu(value) for name, value in copies.items()}


def _cpu(values: list[Any]) -> list[Any]:
    return [value.cpu() if isinstance(value, Tensor) else value for value in values]


@given(arguments=cases())
def test_matches_the_definition(backend: Backend, arguments: Arguments) -> None:
    after = run(backend, arguments)
    for i in range(len(arguments["averages"])):
        elapsed, momentum = definition(arguments, i)
        assert_same_bits(after["elapsed"][i].reshape(-1), elapsed)
        assert_same_bits(after["momenta"][i].reshape(-1), momentum)
    for name in READ:
        for left, right in zip(after[name], arguments[name], strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("adam", [False, True])
def test_blocks_and_threads_change_nothing(
    backend: Backend, threads: Callable[[int], None], adam: bool, dtype: torch.dtype
) -> None:
    sizes = (511, 512, 513, 300_000)
    arguments: Arguments = {
        "averages": [fill((n,), torch.float32, "ties", n) for n in sizes],
        "elapsed": [fill((n,), torch.float32, "normal", n + 1).abs() for n in sizes],
        "momenta": [fill((n,), dtype, "normal", n + 2) for n in sizes],
        "weights": [fill((n,), torch.float32, "normal", n + 3) for n in sizes],
        "owns": [fill((n,), torch.float32, "normal", n + 4) for n in sizes],
        "intervals": [0.1] * len(sizes),
        "times": [0.1, 0.2, 0.0, 0.3],
        "keeps": [1.0, 0.4, 1.0, 0.0],
        "whole": [False, True, False, False],
        "squares": [fill((n,), dtype, "normal", n + 5).abs() for n in sizes],
        "decays": [0.01] * len(sizes),
        "roots": [0.3] * len(sizes),
        "epsilons": [1e-8] * len(sizes),
        "factors": [0.5] * len(sizes),
    }
    if not adam:
        arguments |= {name: [] for name in ADAMS}
    expected = run(Backend("reference"), arguments)
    for count in (1, 2, 3):
        threads(count)
        after = run(backend, arguments)
        for name in ("elapsed", "momenta"):
            for left, right in zip(after[name], expected[name], strict=True):
                assert_same_bits(left, right)


def test_sgd_gains_what_all_ranks_were_faster_by() -> None:
    """Of five entries three have arrived, one after two intervals, one as fast as this rank."""
    average, elapsed = torch.tensor([0.2, 0.0, 0.6, 0.0, 0.1]), torch.tensor([0, 0, 0.1, 0.1, 0])
    momentum, start = torch.ones(5), torch.zeros(5)
    numbers = {"intervals": [0.1], "times": [0.1], "keeps": [1.0], "whole": [False]}
    ops.share_momentum([average], [elapsed], [momentum], [start], [start - 0.1], **numbers, adams=ops.Adams())
    torch.testing.assert_close(momentum, torch.tensor([2.0, 1.0, 3.0, 1.0, 1.0]))
    torch.testing.assert_close(elapsed, torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0]))


def test_adam_moves_on_at_the_speed_of_all_ranks() -> None:
    """With one step in the interval, Adam's next, whose gradient leaves its momentum as it is, goes as far as all."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    adamw = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(4):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([0.5, -0.25])
        adamw.step()
    state, steps = adamw.state[parameter], 4
    average, after = torch.tensor([0.05, -0.02]), parameter.detach().clone()
    adams = ops.Adams([state["exp_avg_sq"]], [0.0], [math.sqrt(1 - 0.99**steps)], [1e-8], [1 - 0.9**steps])
    momentum, elapsed = state["exp_avg"], torch.zeros(2)
    state["step"].sub_(1)  # what is to be made again is the same step
    numbers = {"intervals": [0.1], "times": [0.1], "keeps": [1.0], "whole": [True]}
    ops.share_momentum([average], [elapsed], [momentum], [before], [after], **numbers, adams=adams)
    parameter.grad = momentum.clone()
    state["exp_avg_sq"].sub_(0.01 * parameter.grad**2).div_(0.99)  # its step makes of this what was there
    adamw.step()
    torch.testing.assert_close(after - parameter.detach(), average)


def good() -> Arguments:
    """Arguments that work."""
    three = ("averages", "elapsed", "momenta", "weights", "owns", "squares")
    numbers = {"intervals": [0.1], "times": [0.1], "keeps": [1.0], "whole": [True]}
    return {name: [torch.ones(3)] for name in three} | numbers | {name: [1.0] for name in ADAMS[1:]}


BAD_VALUES: list[BadCase] = [
    ({"averages": [torch.ones(6)[::2]]}, r"averages\[0\] .*contiguous"),
    ({"elapsed": [torch.ones(4)]}, r"elapsed\[0\]:? ha(s|ve) 4 entries.*3 are needed"),
    ({"momenta": [torch.ones(3), torch.ones(3)]}, "momenta has 2 values; 1 are needed"),
    ({"weights": []}, "weights has 0 values; 1 are needed"),
    ({"owns": [torch.ones(4)]}, r"owns\[0\]:? ha(s|ve) 4 entries.*3 are needed"),
    ({"keeps": [math.nan]}, r"keeps\[0\] = nan"),
    ({"squares": []}, "decays has 1 values; 0 are needed"),
    ({"squares": [torch.ones(2)]}, r"squares\[0\]:? ha(s|ve) 2 entries.*3 are needed"),
    ({"intervals": [math.inf]}, r"intervals\[0\] = inf"),
    ({"times": [math.nan]}, r"times\[0\] = nan"),
    ({"whole": []}, "whole has 0 values; 1 are needed"),
    ({"roots": [-1.0]}, r"roots\[0\] = -1"),
    ({"factors": [math.nan]}, r"factors\[0\] = nan"),
]
BAD_TYPES: list[BadCase] = [
    ({"averages": [torch.ones(3).half()]}, r"averages\[0\] is (float16|Half)"),
    ({"elapsed": [torch.ones(3).double()]}, r"elapsed\[0\] is (float64|Double)"),
    ({"momenta": [torch.ones(3).int()]}, r"momenta\[0\] is (int32|Int)"),
    ({"weights": [torch.ones(3).bfloat16()]}, r"weights\[0\] is (bfloat16|BFloat16)"),
]


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ConfigurationError) for case in BAD_VALUES]
    + [(*case, ArgumentTypeError) for case in [*BAD_TYPES, ({"whole": ["yes"]}, r"whole\[0\] is a str")]],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = good() | change
    adams = ops.Adams(**{name: arguments.pop(name) for name in ADAMS})
    with pytest.raises(error, match=f"share_momentum: .*({message})"):
        ops.share_momentum(**arguments, adams=adams)
    assert all(bool((tensor == 1).all()) for name in ("elapsed", "momenta") for tensor in arguments[name])


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [(*case, ValueError) for case in BAD_VALUES] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kernel_refuses_what_would_leave_memory(
    compiled: Backend, change: Arguments, message: str, error: type[Exception]
) -> None:
    arguments = moved(good() | change, compiled.device)
    with pytest.raises(error, match=f"ringprune::share_momentum: .*({message})"):
        torch.ops.ringprune.share_momentum(**arguments)
    assert all(bool((tensor == 1).all()) for name in ("elapsed", "momenta") for tensor in arguments[name])


def test_no_tensors_are_fine() -> None:
    ops.share_momentum([], [], [], [], [], intervals=[], times=[], keeps=[], whole=[], adams=ops.Adams())


def test_autograd_sees_the_writes(backend: Backend) -> None:
    arguments = moved(good(), backend.device)
    adams = {name: arguments.pop(name) for name in ADAMS}
    written = [*arguments["elapsed"], *arguments["momenta"]]
    versions = [tensor._version for tensor in written]
    backend.op("share_momentum")(
        **arguments, **(adams if backend.name == "reference" else {"adams": ops.Adams(**adams)})
    )
    assert all(tensor._version > version for tensor, version in zip(written, versions, strict=True))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ringprune.share_momentum.default, (), good())
