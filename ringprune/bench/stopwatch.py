"""Times calls, and tells which times to trust on a machine that others use as well."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch

__all__ = ["Call", "DeviceClock", "Sample", "Stopwatch", "Times", "WallClock", "stopwatch"]

DISTURBED = 0.03
"""A time counts if our threads waited for a CPU for less than this share of it."""

LEAST = 3
"""Where fewer times count, these many that were disturbed least are taken, and said to be disturbed."""

TASKS, OWN = "/proc/self/task", "/proc/thread-self/schedstat"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sample:
    """One time.

    Attributes:
        seconds: how long the call took.
        waited: share of that which our threads, together, were ready to run and waited for a CPU.
        held_up: seconds that the thread which called waited so itself.
    """

    seconds: float
    waited: float = 0.0
    held_up: float = 0.0

    @property
    def is_calm(self) -> bool:
        """Whether this time counts."""
        return self.waited < DISTURBED


@dataclass
class Times:
    """All times of one call."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def of(self) -> int:
        """How often it was timed."""
        return len(self.samples)

    @property
    def kept(self) -> int:
        """How many of the times count."""
        return sum(sample.is_calm for sample in self.samples)

    @property
    def disturbed(self) -> bool:
        """Whether too few count to go by them alone."""
        return self.kept < min(LEAST, self.of)

    @property
    def seconds(self) -> float:
        """The median of the times that count."""
        calmest = sorted(self.samples, key=lambda sample: sample.waited)
        return median(sample.seconds for sample in calmest[: max(self.kept, LEAST)])

    @property
    def spent(self) -> float:
        """Seconds that all the times took."""
        return sum(sample.seconds for sample in self.samples)


class Stopwatch(Protocol):
    """Times one call."""

    def time(self, call: Call) -> tuple[Sample, Any]:
        """The time of ``call``, and what it returned."""
        ...


class WallClock:
    """For the CPU."""

    def time(self, call: Call) -> tuple[Sample, Any]:
        """The time of ``call``, and what it returned."""
        waited, own = _waited(), _own_wait()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        held_up, waited = _own_wait() - own, _waited() - waited
        return Sample(seconds, waited / max(seconds, 1e-9), min(held_up, seconds)), result


BUSY_CYCLES = 2_000_000
"""For which a GPU is kept busy, about a millisecond: what is launched meanwhile waits for it, and it for no launch."""


class DeviceClock:
    """For CUDA: events around the call, so what the host does counts where the device waits for it.

    Args:
        busy: the device has other work before: launching counts only where it takes longer than that.
    """

    def __init__(self, *, busy: bool = False) -> None:
        self._busy = busy

    def time(self, call: Call) -> tuple[Sample, Any]:
        """The time of ``call``, and what it returned."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if self._busy:
            torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) / 1e3), result


def stopwatch(device: torch.device, *, busy: bool = False) -> Stopwatch:
    """The one for ``device``; ``busy`` as for :class:`DeviceClock`."""
    return DeviceClock(busy=busy) if device.type == "cuda" else WallClock()


def _waited() -> float:
    """Seconds that all threads of this process have waited for a CPU so far; 0 where the system does not tell."""
    seconds = 0.0
    with suppress(OSError):
        for task in os.listdir(TASKS):
            seconds += _wait_of(f"{TASKS}/{task}/schedstat")  # a thread may have ended meanwhile
    return seconds


def _own_wait() -> float:
    """Seconds that this thread has."""
    return _wait_of(OWN)


def _wait_of(path: str) -> float:
    with suppress(OSError, ValueError, IndexError), open(path) as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0
