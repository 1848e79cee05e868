"""Measures the links of a job's ranks: by what messages to the next rank take, short and long, on the slowest."""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from ringprune.comm.communicator import Communicator
from ringprune.errors import ConfigurationError
from ringprune.prediction import Link, MeasuredLink

__all__ = ["probe", "reached"]

SHORT_TIMES, LONG_TIMES = 21, 3  # repetitions, of which the median counts
FIRST, GROWTH, LARGEST = 1 << 20, 4, 1 << 26  # bytes of a long message
LONG_SECONDS = 0.1
"""A message that takes this long is long enough."""


def probe(comm: Communicator, clock: Callable[[], float] = time.perf_counter) -> Link:
    """The link that explains what messages to the next rank take; all ranks call this, and get the same.

    All ranks send and receive at once, as in a ring: both directions of every link are in use.

    Args:
        comm: with whom, two ranks at least; it can shift.
        clock: seconds.

    Raises:
        ConfigurationError: there is one rank, which has no link.
    """
    if comm.size < 2:
        raise ConfigurationError("one rank has no link to measure: start several, mpirun -np 4 ringprune advise ...")
    _seconds(comm, 4, 3, clock)  # the first messages open connections
    latency = _seconds(comm, 4, SHORT_TIMES, clock)
    size = FIRST
    while (taken := _seconds(comm, size, LONG_TIMES, clock)) < LONG_SECONDS and size < LARGEST:
        size *= GROWTH
    # A long message that took no longer than a short one tells nothing; half of its time is then taken for sending.
    return Link(size / max(taken - latency, taken / 2), latency)


def reached(link: Link, found: MeasuredLink) -> Link:
    """The link, with the share of its rate that the longest collectives of each kind have reached."""
    at_once, shares = replace(link, latency_seconds=0.0), {}
    for kind, points in found.points.items():
        payload, seconds = points[-1]
        sending = at_once.seconds(kind, payload, found.ranks)
        latency = link.seconds(kind, payload, found.ranks) - sending
        shares[kind] = min(1.0, sending / max(seconds - latency, 1e-9))
    return replace(link, shares=shares)


def _seconds(comm: Communicator, size: int, times: int, clock: Callable[[], float]) -> float:
    """What a message of ``size`` bytes takes: the median of each rank, and of those the longest."""
    buffer, into, seconds = (
        torch.zeros(size // 4, dtype=torch.float32, device="cpu"),
        torch.zeros(size // 4, dtype=torch.float32, device="cpu"),
        [],
    )
    for _ in range(times):
        start = clock()
        comm.shift(buffer, into, name=f"probe of {size} bytes").wait()
        seconds.append(clock() - start)
    own = torch.tensor([median(seconds)], dtype=torch.float64, device="cpu")
    return float(comm.allgather(own, name="seconds of the probe").wait().max())
