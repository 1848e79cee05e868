"""Clocks: the processor's, and that of a GPU's stream, which is read without waiting for it."""

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ringprune.errors import ConfigurationError

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(Protocol):
    """Moments, and the milliseconds between them."""

    def now(self) -> Any:
        """This moment."""

    def since(self, start: Any, moments: Iterable[Any]) -> list[float]:
        """Milliseconds from ``start`` to each of ``moments``, in their order; waits until all are past."""


class CpuClock:
    """Wall-clock time of this process."""

    def now(self) -> float:
        """This moment."""
        return time.perf_counter()

    def since(self, start: float, moments: Iterable[float]) -> list[float]:
        """Milliseconds from ``start`` to each."""
        return [1e3 * (moment - start) for moment in moments]


class CudaClock:
    """Time of the GPU: moments are events in the current stream, so that nothing waits before :meth:`since`."""

    def now(self) -> Any:
        """This moment, as the GPU will come to it."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, start: Any, moments: Iterable[Any]) -> list[float]:
        """Milliseconds from ``start`` to each, after one synchronisation."""
        torch.cuda.synchronize()
        return [float(start.elapsed_time(moment)) for moment in moments]


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """The clock of those who compute.

    Args:
        devices: where the parameters are.

    Raises:
        ConfigurationError: other devices than CPU and CUDA, or several GPUs.
    """
    kinds = {str(device) for device in devices if device.type != "cpu"}
    if not kinds:
        return CpuClock()
    if len(kinds) > 1 or not all(kind.startswith("cuda") for kind in kinds):
        raise ConfigurationError(f"parameters are on {', '.join(sorted(kinds))}: one CUDA GPU or the CPU can be timed")
    return CudaClock()
