"""Times calls, and tells which times to trust on a machine that others use as well."""

import os
import threading
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

TASKS = "/proc/self/task"

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
        before = _waits()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        after, own = _waits(), str(threading.get_native_id())
        waited = sum(after.values()) - sum(before.values())
        held_up = after.get(own, 0.0) - before.get(own, 0.0)
        return Sample(seconds, waited / max(seconds, 1e-9), min(held_up, seconds)), result


class DeviceClock:
    """For CUDA: events around the call, so launching counts only where the device waits for it."""

    def time(self, call: Call) -> tuple[Sample, Any]:
        """The time of ``call``, and what it returned."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) / 1e3), result


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for ``device``."""
    return DeviceClock() if device.type == "cuda" else WallClock()


def _waits() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a CPU so far; none where the system does not tell."""
    waits = {}
    with suppress(OSError):
        for task in os.listdir(TASKS):
            with suppress(OSError, ValueError, IndexError), open(f"{TASKS}/{task}/schedstat") as file:
                waits[task] = int(file.read().split()[1]) / 1e9  # a thread may have ended meanwhile
    return waits
