"""Parameters with the shapes of a model, and a backward pass that yields gradients drawn beforehand."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exchanges.memory import Memory

__all__ = ["Gradients"]


class _Yield(torch.autograd.Function):
    """Passes its first argument on; backward gives the parameter the gradient that is ready."""

    @staticmethod
    def forward(ctx: Any, running: Tensor, parameter: Tensor, ready: Memory) -> Tensor:
        ctx.ready = ready
        return running.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Any, Tensor, None]:
        # New: autograd takes it as it is, without a copy. What is reduced in place is drawn anew at every step.
        return outputs[0], ctx.ready.tensor(), None


class Gradients(nn.Module):
    """A model without computation: gradients arrive one by one, in the reverse order of its parameters.

    So hooks fire as in training, buckets and overlap work as they do there, and what is timed is the exchange.

    Args:
        shapes: of each parameter, by its name.
        seed: of weights and of the scale of each tensor's gradient, the same on all ranks.
        rank: decides this rank's gradients.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, rank: int) -> None:
        super().__init__()
        shared = torch.Generator().manual_seed(seed)
        self._random = torch.Generator().manual_seed(seed + 1 + rank)
        self._scales = [math.exp(2 * x) for x in torch.randn(len(shapes), generator=shared).tolist()]
        for name, shape in shapes.items():
            weight = torch.empty(shape).normal_(std=0.05, generator=shared)
            self.register_parameter(name.replace(".", "/"), nn.Parameter(weight))  # torch allows no dot here
        self._ready = [Memory(tuple(parameter.shape)) for parameter in self.parameters()]

    @property
    def entries(self) -> int:
        """Entries of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def draw(self) -> None:
        """Draw this rank's gradients of the next step: normal, of another scale in each tensor."""
        for parameter, ready, scale in zip(self.parameters(), self._ready, self._scales, strict=True):
            parameter.grad = None
            ready.tensor().normal_(std=scale, generator=self._random)

    def forward(self) -> Tensor:
        """A scalar whose backward pass yields the gradients drawn."""
        running = torch.zeros(())
        for parameter, ready in zip(self.parameters(), self._ready, strict=True):
            running = _Yield.apply(running, parameter, ready)
        return running
