"""A torch module that takes as long as a profile says and computes nothing; its hooks and gradients are real."""

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from exchanges.memory import Memory
from torch import Tensor, nn

from ringprune.profiles.format import Layer, Profile

__all__ = ["Event", "Nothing", "Waiting", "still_sgd"]

Event = tuple[str, str, float, float]
"""What was done (``"forward"``, ``"backward"``, ``"network"``), in which layer or message, when it began and ended."""

MATRIX = 2048
"""Entries from which on a tensor is made a matrix, which policies pack: a profile tells no shapes."""

DRAWN = 1 << 20
"""Random numbers that weights and gradients are made of, again and again: more would take minutes to draw."""

SPARE, LINE = 1 << 16, 16
"""Gradients begin elsewhere in their numbers at every step, up to so many entries on, at the beginning of a cache line:
so they change from step to step, as a batch's do, and nothing is written."""

Note = Callable[[Event], None]


class _Wait(torch.autograd.Function):
    """Waits forward, waits backward, and hands out gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "WaitingLayer", *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        layer.wait("forward", layer.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer: WaitingLayer = ctx.layer
        layer.wait("backward", layer.backward_seconds)
        return grads[0], None, *layer.gradients()


def _fill(tensor: Tensor, drawn: Tensor) -> Tensor:
    """Write ``drawn`` into a tensor, as often as it takes."""
    for part in tensor.view(-1).split(drawn.numel()):
        part.copy_(drawn[: part.numel()])
    return tensor


class WaitingLayer(nn.Module):
    """One layer of a profile.

    Args:
        layer: what it is.
        scale: what its times are multiplied by.
        note: told what was done, and when.
        drawn: what weights and gradients are made of, the same and another on every rank.
        places: chooses where in them gradients begin.

    Attributes:
        refreshed: gradients are written anew at every step, for who has overwritten them.
    """

    def __init__(self, layer: Layer, scale: float, note: Note, drawn: tuple[Tensor, Tensor], places: Random) -> None:
        super().__init__()
        self.refreshed, (weights, self._drawn), self._places = False, drawn, places
        self.name, self._note = layer.name, note
        self.forward_seconds, self.backward_seconds = 1e-3 * scale * layer.forward_ms, 1e-3 * scale * layer.backward_ms
        shapes = [(1, numel) if numel >= MATRIX else (numel,) for numel in layer.parameters]
        self.tensors = nn.ParameterList(nn.Parameter(_fill(torch.empty(shape), weights)) for shape in shapes)
        self._spare = [min(SPARE, numel) for numel in layer.parameters]
        self._ready = [Memory(shape, spare) for shape, spare in zip(shapes, self._spare, strict=True)]
        self.write()

    def gradients(self) -> list[Tensor]:
        """New tensors, of other values than those before: torch takes them for its own, without a copy."""
        if self.refreshed:
            self.write()
        starts = [LINE * self._places.randint(0, spare // LINE) for spare in self._spare]
        return [ready.tensor(start) for ready, start in zip(self._ready, starts, strict=True)]

    def write(self) -> None:
        """Gradients as they were drawn."""
        for ready in self._ready:
            _fill(ready.all(), self._drawn)

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and give on what came."""
        out: Tensor = _Wait.apply(x, self, *self.tensors)
        return out

    def wait(self, what: str, seconds: float) -> None:
        """Sleep, and note it."""
        start = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        self._note((what, self.name, start, time.perf_counter()))


class Waiting(nn.Module):
    """All layers of a profile, one after the other.

    Args:
        profile: the model.
        scale: what its times are multiplied by.
        rank: decides this rank's gradients; weights are the same on all.

    Attributes:
        events: what was done, and when.
    """

    def __init__(self, profile: Profile, scale: float, rank: int = 0) -> None:
        super().__init__()
        self.events: list[Event] = []
        weights, gradients = (torch.Generator().manual_seed(seed) for seed in (0, 1 + rank))
        drawn = 0.05 * torch.randn(DRAWN, generator=weights), torch.randn(DRAWN, generator=gradients)
        places = Random(rank)
        self.layers = nn.Sequential(*(WaitingLayer(layer, scale, self.note, drawn, places) for layer in profile.layers))
        self.register_buffer("start", torch.ones(1))

    def forward(self) -> Tensor:
        """The loss."""
        out: Tensor = self.layers(self.start.clone().requires_grad_()).sum()
        return out

    def refresh(self) -> None:
        """From now on write gradients anew at every step."""
        for layer in self._layers():
            layer.refreshed = True

    def write(self) -> None:
        """Write gradients anew, once."""
        for layer in self._layers():
            layer.write()

    def _layers(self) -> Iterator[WaitingLayer]:
        for layer in self.layers:
            assert isinstance(layer, WaitingLayer)
            yield layer

    def note(self, event: Event) -> None:
        """Something was done."""
        self.events.append(event)


class Nothing(torch.optim.Optimizer):
    """An optimizer whose step takes no time, as a GPU's takes next to none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def still_sgd(params: Any) -> torch.optim.SGD:
    """SGD with momentum, whose step does nothing: RingPrune takes its momentum over, and velocities with it.

    A class of our own it would not know.
    """
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer.step = lambda closure=None: None  # this one's alone: its class stays SGD
    return optimizer
