"""Measures links with MPI messages: pair by pair while all others are silent, then a ring with all at once."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

__all__ = ["Links", "Pair", "measure_links", "wait_quietly"]

UNIT = 256 * 1024  # bytes of a message
WINDOW = 16  # messages under way together
MOST_MESSAGES = 16_384  # 4 GiB
PING_PONGS = 100
QUIET_SECONDS = 1e-3


@dataclass(frozen=True)
class Pair:
    """A link, as measured while nothing else was sent.

    Attributes:
        bits_per_second: of payload, from the first to the second.
        seconds: of half a round trip of one byte, median.
    """

    bits_per_second: float
    seconds: float


@dataclass(frozen=True)
class Links:
    """All that was measured between ``size`` places.

    Attributes:
        pairs: by (from, to); where there are many places only some.
        ring: bit/s that each place sent to the next while all others did the same.
    """

    pairs: dict[tuple[int, int], Pair]
    ring: list[float]


def measure_links(places: MPI.Intracomm, seconds: float, most_pairs: int) -> Links:
    """Measure the links between the ranks of a communicator. Collective; every rank gets the result.

    Args:
        places: one rank for each place.
        seconds: how long each measurement takes, about.
        most_pairs: where there are more ordered pairs, only those to the 1st, 2nd, 4th, ... next are measured.
    """
    mine: dict[tuple[int, int], Pair] = {}
    for sender, receiver in _chosen(places.size, most_pairs):
        if places.rank == sender:
            mine[sender, receiver] = _measure(places, receiver, seconds)
        elif places.rank == receiver:
            _answer(places, sender)
        wait_quietly(places)
    pairs = {pair: found for part in places.allgather(mine) for pair, found in part.items()}
    return Links(pairs, _measure_ring(places, pairs, seconds) if places.size > 1 else [])


def wait_quietly(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the core to others meanwhile."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(QUIET_SECONDS)


def _chosen(size: int, most_pairs: int) -> Iterator[tuple[int, int]]:
    steps: Sequence[int] = range(1, size)
    if size * (size - 1) > most_pairs:
        steps = [2**i for i in range(size.bit_length()) if 2**i < size]
    for step in steps:
        for sender in range(size):
            yield sender, (sender + step) % size


def _measure(comm: MPI.Intracomm, to: int, seconds: float) -> Pair:
    latency = _ping(comm, to)
    messages, elapsed = 1, _batch(comm, to, 1)
    while elapsed < seconds / 2 and messages < MOST_MESSAGES:
        # Not more than eightfold: the first messages open connections and TCP's window.
        messages = min(MOST_MESSAGES, max(messages + 1, int(messages * min(8.0, seconds / elapsed))))
        elapsed = _batch(comm, to, messages)
    comm.send(0, to)
    return Pair(8 * UNIT * messages / elapsed, latency)


def _answer(comm: MPI.Intracomm, sender: int) -> None:
    """The other side of :func:`_measure`."""
    byte = np.zeros(1, np.uint8)
    for _ in range(PING_PONGS):
        comm.Recv(byte, sender)
        comm.Send(byte, sender)
    while messages := int(comm.recv(source=sender)):
        comm.Send(byte, sender)
        _receive(comm, sender, messages)
        comm.Send(byte, sender)


def _ping(comm: MPI.Intracomm, to: int) -> float:
    byte = np.zeros(1, np.uint8)
    times = []
    for _ in range(PING_PONGS):
        begin = time.perf_counter()
        comm.Send(byte, to)
        comm.Recv(byte, to)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / 2


def _batch(comm: MPI.Intracomm, to: int, messages: int) -> float:
    """Seconds from the first of so many messages to the answer that the last has come."""
    byte = np.zeros(1, np.uint8)
    comm.send(messages, to)
    comm.Recv(byte, to)
    begin = time.perf_counter()
    _send(comm, to, messages)
    comm.Recv(byte, to)
    return time.perf_counter() - begin


def _send(comm: MPI.Intracomm, to: int, messages: int) -> None:
    message = np.ones(UNIT, np.uint8)
    for first in range(0, messages, WINDOW):
        MPI.Request.Waitall([comm.Isend(message, to) for _ in range(min(WINDOW, messages - first))])


def _receive(comm: MPI.Intracomm, sender: int, messages: int) -> None:
    room = np.empty((WINDOW, UNIT), np.uint8)
    for first in range(0, messages, WINDOW):
        MPI.Request.Waitall([comm.Irecv(room[i], sender) for i in range(min(WINDOW, messages - first))])


def _measure_ring(comm: MPI.Intracomm, pairs: dict[tuple[int, int], Pair], seconds: float) -> list[float]:
    slowest = min(pairs[i, (i + 1) % comm.size].bits_per_second for i in range(comm.size))
    messages = min(MOST_MESSAGES, max(2, int(2 * seconds * slowest / 8 / UNIT)))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, room = np.ones(UNIT, np.uint8), np.empty((WINDOW, UNIT), np.uint8)
    elapsed = 0.0
    for count in (2, messages):  # the first opens connections
        comm.Barrier()
        begin = time.perf_counter()
        for first in range(0, count, WINDOW):
            window = range(min(WINDOW, count - first))
            received = [comm.Irecv(room[i], before) for i in window]
            MPI.Request.Waitall([*received, *(comm.Isend(sent, after) for _ in window)])
        elapsed = time.perf_counter() - begin
    return list(comm.allgather(8 * UNIT * messages / elapsed))
