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
    """Time of a GPU: moments are events in its current stream, so that nothing waits before :meth:`since`.

    Args:
        device: which; None is the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def now(self) -> Any:
        """This moment, as the GPU will come to it."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # not the current device's: it may be another
        return event

    def since(self, start: Any, moments: Iterable[Any]) -> list[float]:
        """Milliseconds from ``start`` to each, after one synchronisation."""
        torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(moment)) for moment in moments]


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """The clock of those who compute.

    Args:
        devices: where the parameters are.

    Raises:
        ConfigurationError: other devices than CPU and CUDA, or several GPUs.
    """
    others = {device for device in devices if device.type != "cpu"}
    if not others:
        return CpuClock()
    if len(others) > 1 or not all(device.type == "cuda" for device in others):
        names = ", ".join(sorted(map(str, others)))
        raise ConfigurationError(f"parameters are on {names}: one CUDA GPU or the CPU can be timed")
    return CudaClock(*others)
