"""When each gradient is there in a step, how long the exchange takes and how long all else does."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ringprune.clock import clock_for

__all__ = ["Timeline", "Times"]


@dataclass(frozen=True)
class Times:
    """Of a step, in seconds; medians of those that were timed.

    Attributes:
        compute: all but the exchange: from the end of one step to that of the next.
        ready: from the beginning to each gradient, in the order of the parameters; 0 for one that never came.
    """

    compute: float
    ready: tuple[float, ...]


class Timeline:
    """Notes moments of steps whose exchange follows the backward pass; on a GPU those of its stream.

    Args:
        parameters: how many.
        devices: where they live.
    """

    def __init__(self, parameters: int, devices: Sequence[torch.device]) -> None:
        self._clock, self._number = clock_for(devices), parameters
        self._steps: list[tuple[float, list[float]]] = []
        self._begin()

    def _begin(self) -> None:
        self._start = self._clock.now()
        self._ready: dict[int, Any] = {}
        self._asides: list[Any] = []  # begin and end of each

    def ready(self, parameter: int) -> None:
        """A gradient is there."""
        self._ready[parameter] = self._clock.now()

    def exchange(self) -> None:
        """The exchange begins, or something else that is part of it."""
        self._asides.append(self._clock.now())

    def exchanged(self) -> None:
        """That is over."""
        self._asides.append(self._clock.now())

    def again(self) -> None:
        """The step is not made: another one begins."""
        self._begin()

    def stepped(self) -> None:
        """The step is made, and the next one begins."""
        moments = [*self._ready.values(), *self._asides, self._clock.now()]
        since = [milliseconds / 1e3 for milliseconds in self._clock.since(self._start, moments)]
        found, asides = dict(zip(self._ready, since, strict=False)), since[len(self._ready) : -1]
        compute = since[-1] - sum(asides[1::2]) + sum(asides[::2])
        self._steps.append((compute, [found.get(i, 0.0) for i in range(self._number)]))
        self._begin()

    def times(self) -> Times:
        """The medians."""
        compute = median(seconds for seconds, _ in self._steps)
        return Times(
            compute, tuple(median(column) for column in zip(*(ready for _, ready in self._steps), strict=True))
        )
