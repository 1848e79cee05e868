"""The look at the first optimizer that steps under DistributedDataParallel: what is left of it, and when."""

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from ringprune import ddp_steps
from ringprune.ddp_steps import FirstStep


def hooks() -> int:
    """How many there are, less those of other tests whose work is done."""
    gc.collect()
    ddp_steps._take_back()
    return len(optimizers._global_optimizer_pre_hooks)


def collect(*given: object) -> None:
    """What may happen anywhere, as a hook."""
    gc.collect()


def stepping(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.SGD(params, lr=0.1)


def test_it_looks_once_at_the_optimizer_of_its_parameters_and_goes() -> None:
    params, others, seen = [nn.Parameter(torch.zeros(2))], [nn.Parameter(torch.zeros(2))], list[Any]()
    before = hooks()
    first = FirstStep(params, seen.append)
    stepping(others).step()
    first.settle()
    assert not seen
    optimizer = stepping(params)
    optimizer.step()
    optimizer.step()
    first.settle()
    assert seen == [optimizer]
    assert len(optimizers._global_optimizer_pre_hooks) == before


def test_one_that_is_collected_inside_of_a_step_does_not_break_that() -> None:
    """Torch goes through the hooks of all optimizers then, and garbage in a cycle may be collected anywhere."""
    before = hooks()
    collecting = optimizers.register_optimizer_step_pre_hook(collect)
    params = [nn.Parameter(torch.zeros(2))]
    first = FirstStep(params, lambda optimizer: None)
    first.itself = first
    gone = weakref.ref(first)
    del first
    stepping(params).step()
    assert gone() is None
    collecting.remove()
    again = FirstStep(params, lambda optimizer: None)
    assert len(optimizers._global_optimizer_pre_hooks) == before + 1
    stepping(params).step()
    again.settle()
    assert len(optimizers._global_optimizer_pre_hooks) == before
