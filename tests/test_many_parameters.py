"""Work grows with the number of parameters, and not with its square."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ringprune as rp
from ringprune import arguments
from ringprune.momentum import TakenOverMomentum
from ringprune.plan import ParamSpec

FEW, TIMES = 40, 4


class Name(str):
    """Compared by a function that can be seen; a list compares strings out of sight."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def momentum_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called in this thread, compiled ones too."""
    seen = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            work()
    finally:
        sys.setprofile(None)
    return seen


def naming(number: int) -> int:
    """Parameters get their names."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(number)]
    optimizer, named = momentum_sgd(params), [(Name(f"layer {i}"), param) for i, param in enumerate(params)]
    return calls_of(lambda: arguments.name_parameters(optimizer, named))


def adopting(number: int) -> int:
    """An optimizer that has made steps is wrapped."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(number)]
    optimizer = momentum_sgd(params)
    for param in params:
        param.grad = torch.ones(1)
    optimizer.step()
    specs = [ParamSpec(f"layer {i}", (1,), p.dtype, p.device, 0) for i, p in enumerate(params)]
    return calls_of(TakenOverMomentum(optimizer, params, specs, [True] * number).adopt)


def layer_by_layer(number: int) -> int:
    """With a schedule each layer's step is made by itself."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(number // 2)])

    def rank(comm: rp.comm.Communicator) -> int:
        policy = replace(rp.IWP(0.5), schedule=rp.P3(fuse_bytes=0).schedule)  # it takes momentum over
        optimizer = rp.DistributedOptimizer(
            momentum_sgd(list(model.parameters())), policy=policy, comm=comm, model=model
        )

        def step() -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()  # where parameters are used first is watched
        return calls_of(step)

    return rp.simulate(1, rank)[0]


@pytest.mark.parametrize("calls", [naming, adopting, layer_by_layer])
def test_four_times_as_many_parameters_take_about_four_times_as_many_calls(calls: Callable[[int], int]) -> None:
    """Names were compared with all names, what was adopted with all that is; and each layer looked at all others."""
    assert calls(TIMES * FEW) < 1.3 * TIMES * calls(FEW)
