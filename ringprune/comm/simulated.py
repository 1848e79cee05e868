"""A communicator whose ranks are threads of one process: for tests, and for trying many ranks on one machine.

Nothing is sent. The n-th call of every rank meets the n-th call of the others; once all have come, the result is
computed once, in rank order, so every rank gets the same bytes in every run.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import Ability, Handle
from ringprune.comm.meeting import Group, Meeting
from ringprune.errors import ConfigurationError
from ringprune.rank_words import alike, listed

__all__ = ["SimulatedCommunicator", "simulate"]

T = TypeVar("T")

SECONDS_TO_END = 5.0
"""That a rank has, after Ctrl-C, to come to its next collective."""


def simulate(
    world_size: int,
    fn: Callable[["SimulatedCommunicator"], T],
    *,
    timeout: float | None = 60.0,
    ranks_per_node: int | None = None,
    one_at_a_time: bool = False,
) -> list[T]:
    """Run ``fn(comm)`` on every one of ``world_size`` in-process ranks and return their results in rank order.

    Torch's global random generator is shared by all ranks: draw from a ``torch.Generator`` of your own.

    Args:
        world_size: number of ranks, each a thread.
        fn: what a rank does.
        timeout: seconds that a rank may wait in one collective; None is no limit.
        one_at_a_time: a rank computes until it has to wait for another, while the others stand still. Many ranks on few
            cores are several times faster so: threads that run small torch operations hinder each other.
        ranks_per_node: ranks on each node, filled in rank order, the last one with what is left; None is one node.

    Raises:
        ConfigurationError: ``world_size`` or ``ranks_per_node`` is below 1.
        CollectiveMismatchError: the ranks called different collectives; the message names the calls.
        CommunicatorError: a rank returned while others waited for it, or the time limit was reached.
        Exception: whatever the first rank to fail raised, with the other ranks' errors as notes.
    """
    if world_size < 1:
        raise ConfigurationError(f"simulate: world_size is {world_size}; at least 1 is needed")
    per_node = world_size if ranks_per_node is None else ranks_per_node
    if per_node < 1:
        raise ConfigurationError(f"simulate: ranks_per_node is {per_node}; at least 1 is needed")
    group = Group(world_size, timeout, threading.Lock() if one_at_a_time else None)
    results: dict[int, T] = {}
    # Daemons: a rank that never ends must not keep the interpreter from exiting.
    threads = [
        threading.Thread(target=_run_rank, args=(group, rank, per_node, fn, results), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        _join(group, threads)
    except KeyboardInterrupt:
        group.stop("the simulation was stopped")
        _end(threads)
        raise
    finally:
        group.stop("the simulation was stopped")  # frees threads that still wait
    if group.errors:
        raise _first_error(group)
    group.check_complete()
    return [results[rank] for rank in range(world_size)]


class SimulatedCommunicator(CheckedCommunicator):
    """One rank of a simulated group; made by :func:`simulate`.

    Args:
        group: all ranks.
        rank: this one.
        host: number of the node that it is on.
    """

    kind = "simulated"
    abilities: frozenset[Ability] = frozenset({"broadcast", "allreduce", "allgather", "alltoall", "shift", "divide"})

    def __init__(self, group: Group, rank: int, host: int = 0) -> None:
        super().__init__(rank, group.size)
        self._group, self._number, self._times = group, host, 0

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        """Nothing is sent, so everything can be carried."""

    def _host(self) -> int:
        return self._number

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> "SimulatedCommunicator | None":
        self._times += 1
        own = next((tuple(part) for part in parts if self.rank in part), None)
        if own is None:
            return None
        return SimulatedCommunicator(self._group.part(own, self._times), own.index(self.rank), self._number)

    def _duplicate(self) -> "SimulatedCommunicator":
        self._times += 1
        return SimulatedCommunicator(self._group.part(tuple(range(self.size)), self._times), self.rank, self._number)

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        return _SimulatedHandle(self._group, self.rank, self._group.enter(self.rank, call, tensor), into)


class _SimulatedHandle:
    def __init__(self, group: Group, rank: int, meeting: Meeting, into: Tensor) -> None:
        self._group = group
        self._rank = rank
        self._meeting: Meeting | None = meeting
        self._into = into

    def done(self) -> bool:
        return self._meeting is None or self._group.is_decided(self._meeting)

    def wait(self) -> Tensor:
        if self._meeting is not None:
            result = self._group.wait(self._rank, self._meeting)
            # A rank writes its own tensors only, and only now: until its wait the tensor is the collective's.
            self._meeting.write(result, self._into)
            self._meeting = None
        return self._into


def _run_rank(
    group: Group, rank: int, per_node: int, fn: Callable[[SimulatedCommunicator], T], results: dict[int, T]
) -> None:
    """Run one rank and tell the group how it ended."""
    try:
        # Backward of CUDA tensors would call all ranks' hooks in one thread, where one rank's would wait for another's.
        with group.turn or nullcontext(), torch.autograd.set_multithreading_enabled(False):
            results[rank] = fn(SimulatedCommunicator(group, rank, rank // per_node))
    except BaseException as error:  # also SystemExit and pytest's outcomes: simulate() raises it again
        group.end(rank, error)
    else:
        group.end(rank, None)


def _join(group: Group, threads: list[threading.Thread]) -> None:
    """Wait for all threads; once a rank has failed, only as long as a rank may wait in a collective."""
    deadline: float | None = None
    for thread in threads:
        while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            thread.join(0.1)
            if group.errors and deadline is None and group.timeout is not None:
                deadline = time.monotonic() + group.timeout


def _end(threads: list[threading.Thread]) -> None:
    """Wait a while for threads that have been stopped: one that computes as Python ends aborts the process."""
    deadline = time.monotonic() + SECONDS_TO_END
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def _first_error(group: Group) -> BaseException:
    """The error to raise: of the rank that failed first, or rank 0's where all failed alike."""
    errors = group.errors
    alike = len(errors) == group.size and len({type(error) for error in errors.values()}) == 1
    first = 0 if alike else next(iter(errors))
    if sys.version_info >= (3, 11):  # notes came with 3.11; without them the first error stands alone
        for note in _notes(group, first):
            errors[first].add_note(note)
    return errors[first]


def _notes(group: Group, first: int) -> Iterator[str]:
    """Where the error that is raised came from, and how the other ranks ended."""
    yield f"raised on simulated rank {first} of {group.size}"
    said = ((rank, f"{type(error).__name__}: {error}") for rank, error in sorted(group.errors.items()))
    for text, ranks in alike(said).items():
        if first not in ranks:
            yield f"{listed(ranks)}: {text}"
    running = [rank for rank in range(group.size) if rank not in group.ended]
    if running:
        yield f"{listed(running)}: still running, left behind"
