"""Clocks: which one measures what."""

from typing import Any

import pytest
import torch

import ringprune as rp
from ringprune.clock import CpuClock, CudaClock, clock_for


def devices(*names: str) -> list[torch.device]:
    return [torch.device(name) for name in names]


def test_the_clock_is_that_of_the_device() -> None:
    assert isinstance(clock_for(devices("cpu")), CpuClock)
    assert isinstance(clock_for(devices("cuda:0", "cuda:0")), CudaClock)
    assert isinstance(clock_for(devices("cpu", "cuda:1")), CudaClock)


@pytest.mark.parametrize("names", [("cuda:0", "cuda:1"), ("xpu:0",), ("meta",)])
def test_others_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(rp.ConfigurationError, match=names[0]):
        clock_for(devices(*names))


def test_the_processors_clock_goes_on() -> None:
    clock = CpuClock()
    moments = [clock.now() for _ in range(5)]
    times = clock.since(moments[0], moments)
    assert times[0] == 0
    assert times == sorted(times)


def test_a_gpus_moments_are_read_after_one_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events as torch has them, played: no GPU is needed to see who waits for whom."""
    did: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            self.number = did.count("record")
            did.append("record")

        def elapsed_time(self, other: Any) -> float:
            return float(other.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append(f"wait for {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = CudaClock(torch.device("cuda:1"))
    moments = [clock.now() for _ in range(4)]
    assert did == ["record"] * 4
    assert clock.since(moments[0], moments) == [0, 1, 2, 3]
    assert did == ["record"] * 4 + ["wait for cuda:1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpus_moments_are_in_order() -> None:
    clock, matrix = CudaClock(), torch.ones(512, 512, device="cuda")
    moments = [clock.now()]
    for _ in range(3):
        matrix = matrix @ matrix / 512
        moments.append(clock.now())
    times = clock.since(moments[0], moments)
    assert times == sorted(times)
    assert times[-1] > times[0]
