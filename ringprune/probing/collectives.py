"""Measures the collectives of a job as its communicator makes them, with messages short and long."""

import time
from collections.abc import Callable, Collection
from statistics import median

import torch
from torch import Tensor

from ringprune.comm.communicator import CPU, Communicator
from ringprune.prediction import Kind, MeasuredLink

__all__ = ["measured_link"]

SIZES = tuple(1 << power for power in (2, 14, 16, 18, 20, 22, 24))
"""Bytes of payload: one that says what a collective takes at all, and longer ones until they take long enough."""

SHORT_TIMES, LONG_TIMES = 9, 3  # repetitions, of which the median counts
LONG_SECONDS = 0.1
"""A message that takes this long tells what the next larger one takes."""


def measured_link(
    comm: Communicator,
    kinds: Collection[Kind],
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
    most: int = SIZES[-1],
) -> MeasuredLink:
    """What collectives take; all ranks call this, and get the same: the slowest rank's times.

    Args:
        comm: with whom, two ranks at least.
        kinds: the collectives that are asked about.
        device: where messages live.
        clock: seconds.
        most: bytes of the longest message that is asked about; no much longer ones are sent.
    """
    points: dict[Kind, tuple[tuple[float, float], ...]] = {}
    for kind in sorted({"allreduce", *kinds}):
        found: list[tuple[float, float]] = []
        _seconds(comm, kind, SIZES[0], device, clock, 3)  # the first messages open connections
        for size in SIZES:
            payload, times = _payload(kind, size, comm.size), SHORT_TIMES if size <= SIZES[1] else LONG_TIMES
            if found and payload <= found[-1][0]:
                continue  # one entry for each of thousands of ranks is more than a short message has
            found.append((payload, _seconds(comm, kind, size, device, clock, times)))
            if len(found) > 2 and (size >= most or found[-1][1] > LONG_SECONDS):
                break
        points[kind] = tuple(found)
    return MeasuredLink(points, comm.size)


def _payload(kind: Kind, size: int, ranks: int) -> float:
    """The bytes of a call with ``size`` of them, as predictions count them."""
    entries = max(1, size // 4)
    if kind in ("allreduce", "broadcast"):
        return 4.0 * entries
    if kind == "allgather":
        return 4.0 * _part(entries, ranks) * ranks
    return 4.0 * _part(entries, ranks) * (2 if kind == "ring" else 1) * (ranks - 1)


def _part(entries: int, ranks: int) -> int:
    """Entries of a rank's share."""
    return max(1, entries // ranks)


def _seconds(
    comm: Communicator, kind: Kind, size: int, device: torch.device, clock: Callable[[], float], times: int
) -> float:
    """Of one call: each rank's median, and of those the longest."""
    entries = max(1, size // 4)
    whole = torch.zeros(entries, dtype=torch.float32, device=device)
    parts = torch.zeros(_part(entries, comm.size) * comm.size, dtype=torch.float32, device=device)
    one = parts[: _part(entries, comm.size)]
    start_line, seconds = torch.zeros(1, dtype=torch.float32, device=device), []
    for _ in range(times):
        comm.allreduce(start_line, name="start of the probe").wait()
        _synchronized(device)
        start = clock()
        _call(comm, kind, whole, parts, one, f"probe, {kind} of {size} bytes")
        _synchronized(device)
        seconds.append(clock() - start)
    own = torch.tensor([median(seconds)], dtype=torch.float64, device=device)
    return float(comm.allgather(own, name="seconds of the probe").wait().max())


def _call(comm: Communicator, kind: Kind, whole: Tensor, parts: Tensor, one: Tensor, name: str) -> None:
    if kind == "allreduce":
        comm.allreduce(whole, name=name).wait()
    elif kind == "broadcast":
        comm.broadcast(whole, root=0, name=name).wait()
    elif kind == "allgather":
        comm.allgather(one, name=name).wait()
    elif kind == "alltoall":
        comm.alltoall(parts, name=name).wait()
    else:
        into = torch.empty_like(one)
        for _ in range(2 * (comm.size - 1)):
            comm.shift(one, into, name=name).wait()


def _synchronized(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
