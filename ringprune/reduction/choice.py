"""Stage 6: whether the library's allreduce or our ring sums float32 values: measured once, the same on every rank."""

import math
import time
from dataclasses import dataclass
from statistics import median

import torch

from ringprune.comm.communicator import CPU, Communicator
from ringprune.reduction.ring import RingReduction

__all__ = ["RingChoice", "choose_ring"]

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Bytes that are summed, one size after the other while there is time."""

SECONDS = 2.0
"""What measuring may take, about: a size that would take longer is not tried."""

RUNS = 3

MARGIN = 0.95
"""The ring has to take less than this share of the library's time."""


@dataclass(frozen=True)
class RingChoice:
    """From which size the ring is used.

    Attributes:
        from_bytes: bytes of float32 values; infinity is never.
        reason: one line for people.
    """

    from_bytes: float
    reason: str

    @classmethod
    def never(cls) -> "RingChoice":
        """Before it is known, and where it is not asked for."""
        return cls(math.inf, "the library's allreduce is used")

    def takes(self, nbytes: int) -> bool:
        """Whether the ring sums ``nbytes`` bytes of float32 values."""
        return nbytes >= self.from_bytes


@dataclass(frozen=True)
class _Timing:
    nbytes: int
    ring: float
    library: float

    @property
    def gain(self) -> float:
        """Seconds that the ring gains, its margin taken off."""
        return MARGIN * self.library - self.ring

    def __str__(self) -> str:
        return f"{_in_units(self.nbytes)}: ring {self.ring * 1e3:.3g} ms, library {self.library * 1e3:.3g} ms"


def choose_ring(comm: Communicator, longest: float, device: torch.device = CPU) -> RingChoice:
    """Measure both where there is a choice; all ranks call this together and get the same answer.

    Takes about ``SECONDS`` at most, and on links so slow that 64 KB take longer, four sums of 64 KB by each. The bytes
    sent stand in ``comm.traffic`` like all others: up to six sums of ``longest`` bytes.

    Args:
        comm: the communicator.
        longest: bytes of the longest sum that will be made; longer ones than 16 MiB are not tried.
        device: where the values are that will be summed.
    """
    if comm.size == 1:
        return RingChoice(math.inf, "one rank: nothing is sent")
    if comm.kind == "simulated":
        return RingChoice(math.inf, "simulated ranks: nothing is sent, so there is nothing to measure")
    if "shift" not in comm.abilities:
        return RingChoice(math.inf, f"the {comm.kind} communicator cannot shift: its allreduce is used")
    if comm.kind == "torch" and device.type != "cpu":
        # The host would measure Gloo, and NCCL makes rings itself.
        return RingChoice(math.inf, f"values on {device.type}: torch.distributed's allreduce is used")
    if longest < SIZES[0]:
        return RingChoice(math.inf, f"the library's allreduce is used: no sum takes {_in_units(SIZES[0])}")
    most = min(int(longest), SIZES[-1])
    return _decide(_measure(comm, [*(nbytes for nbytes in SIZES if nbytes < most), most]))


def _measure(comm: Communicator, sizes: list[int]) -> list[_Timing]:
    """Both, at one size after the other; the times are the ranks' means, so that all ranks go on or stop alike."""
    _time_both(comm, sizes[0], runs=1)  # connections are made, memory is touched
    timings = [_time_both(comm, sizes[0], RUNS)]
    left = SECONDS - RUNS * (timings[0].ring + timings[0].library)
    for nbytes in sizes[1:]:
        expected = (timings[-1].ring + timings[-1].library) * nbytes / timings[-1].nbytes
        runs = min(RUNS, int(left / expected))
        if runs < 1:
            break
        timings.append(_time_both(comm, nbytes, runs))
        left -= runs * (timings[-1].ring + timings[-1].library)
    return timings


def _time_both(comm: Communicator, nbytes: int, runs: int) -> _Timing:
    values = torch.zeros(nbytes // 4, dtype=torch.float32, device="cpu")
    seconds = torch.zeros(runs, 2, dtype=torch.float64, device="cpu")
    for run in range(runs):
        name = f"choice of allreduce, {nbytes} bytes, run {run + 1}"
        start = time.perf_counter()
        RingReduction(comm, values, None, name=name).wait()
        middle = time.perf_counter()
        comm.allreduce(values, name=name).wait()
        seconds[run, 0], seconds[run, 1] = middle - start, time.perf_counter() - middle
    means = comm.allreduce(seconds, name="choice of allreduce, seconds").wait() / comm.size
    return _Timing(nbytes, median(means[:, 0].tolist()), median(means[:, 1].tolist()))


def _decide(timings: list[_Timing]) -> RingChoice:
    """The ring, from where it is faster up to the largest size measured: there the gain is taken to be linear."""
    slower = [timing for timing in timings if timing.gain <= 0]
    if timings[-1].gain <= 0:
        return RingChoice(math.inf, f"the library's allreduce is used: at {timings[-1]}")
    if not slower:
        return RingChoice(timings[0].nbytes, f"our ring from {_in_units(timings[0].nbytes)}: at {timings[0]}")
    low, high = slower[-1], timings[timings.index(slower[-1]) + 1]
    share = -low.gain / (high.gain - low.gain)
    start = low.nbytes + math.ceil(share * (high.nbytes - low.nbytes))
    return RingChoice(start, f"our ring from {_in_units(start)}: at {low}; at {high}")


def _in_units(nbytes: int) -> str:
    return f"{nbytes / 1024:.0f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.3g} MiB"
