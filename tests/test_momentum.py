"""Momentum and weight decay that the wrapper makes in place of SGD: the same numbers, without memory of their size."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringprune.momentum import TakenOverMomentum
from ringprune.plan import ParamSpec

SHAPE = (64, 64)


def taken_over(
    number: int, *, packed: bool, **settings: Any
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, TakenOverMomentum]:
    """Parameters with gradients, their SGD, and what takes its momentum over."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(number)]
    for param in params:
        param.grad = torch.randn(SHAPE, generator=generator)
    optimizer = torch.optim.SGD(params, lr=0.1, **settings)
    specs = [ParamSpec(f"layer {i}", SHAPE, param.dtype, param.device, 0) for i, param in enumerate(params)]
    return params, optimizer, TakenOverMomentum(optimizer, params, specs, [packed] * number)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_with_the_momentum_of_packed_tensors_it_is_sgd(packed: bool, nesterov: bool, maximize: bool) -> None:
    """What is packed has had the momentum of its gradient before; with that of its weight decay it is SGD's own."""
    settings = {"momentum": 0.9, "weight_decay": 0.3, "nesterov": nesterov, "maximize": maximize}
    (own,), optimizer, momentum = taken_over(1, packed=packed, **settings)
    twin = torch.nn.Parameter(own.detach().double())
    plain, velocity = torch.optim.SGD([twin], lr=0.1, **settings), torch.zeros(SHAPE)
    for step in range(5):
        grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        velocity = 0.9 * velocity + grad
        arrived = (grad + 0.9 * velocity if nesterov else velocity) if packed else grad
        own.grad, twin.grad = arrived.clone(), grad.double()
        momentum.apply()
        with momentum.taken_over():
            optimizer.step()
        plain.step()
        torch.testing.assert_close(own.double(), twin, rtol=1e-5, atol=1e-5)


class Made(TorchDispatchMode):
    """Counts the tensors of ``SHAPE`` that operations make in memory of their own."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and look at what it returns."""
        given = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.shape == SHAPE]
        self.number += sum(leaf.data_ptr() not in given for leaf in made)
        return result


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_weight_decay_takes_no_memory_of_a_tensors_size(packed: bool, nesterov: bool) -> None:
    """Of packed tensors it was made in three tensors more, which took longer than all of SGD's own step."""
    _, _, momentum = taken_over(3, packed=packed, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    momentum.apply()
    with Made() as made:
        momentum.apply()
    assert not made.number
