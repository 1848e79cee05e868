"""Where simulated ranks meet: the n-th collective of every rank, matched and computed, or why it cannot be."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.communicator import Ability
from ringprune.errors import CollectiveMismatchError, CommunicatorError
from ringprune.rank_words import alike, listed

__all__ = ["Group", "Meeting"]


class Meeting:
    """One collective: which ranks have called it, and with what; and what each of them gets."""

    def __init__(self, number: int, lock: threading.RLock) -> None:
        self.number = number
        self.calls: dict[int, Call] = {}
        self.tensors: dict[int, Tensor] = {}
        self.outcome: Sequence[Tensor] | None = None
        self._given: list[Any] = []  # of a GPU: each rank may work on a stream of its own
        self._computed: Any = None
        self.changed = threading.Condition(lock)

    def enter(self, rank: int, call: Call, tensor: Tensor) -> None:
        """A rank has called it, after what its stream was given until now."""
        self.calls[rank], self.tensors[rank] = call, tensor
        if tensor.is_cuda:
            self._given.append(torch.cuda.current_stream(tensor.device).record_event())

    def settle(self) -> None:
        """Compute the outcome of a collective that all ranks have called."""
        ranks = sorted(self.calls)
        calls, tensors = [self.calls[rank] for rank in ranks], [self.tensors[rank].detach() for rank in ranks]
        stream: Any = torch.cuda.current_stream(tensors[0].device) if self._given else None
        for moment in self._given:
            stream.wait_event(moment)
        with torch.no_grad():
            self.outcome = _COMPUTE[calls[0].op](calls, tensors)
        self._computed = stream and stream.record_event()
        self.tensors.clear()

    def write(self, result: Tensor, into: Tensor) -> None:
        """Write a rank's part of the outcome where the rank wants it."""
        if self._computed is not None:
            stream = torch.cuda.current_stream(result.device)
            stream.wait_event(self._computed)
            result.record_stream(stream)
        with torch.no_grad():
            into.copy_(result)


class Group:
    """The ranks of one simulation, or some of them.

    Args:
        size: number of ranks.
        timeout: seconds a rank may wait in one collective; None is no limit.
        turn: what a rank holds while it computes, where one does at a time; None lets all of them.

    Attributes:
        size: number of ranks.
        timeout: seconds a rank may wait in one collective; None is no limit.
        ended: how the ranks that have ended did so, in that order.
        errors: what ranks raised, in that order.
    """

    def __init__(self, size: int, timeout: float | None, turn: "threading.Lock | None" = None) -> None:
        self.size = size
        self.turn = turn
        self.timeout = timeout
        self.ended: dict[int, str] = {}
        self.errors: dict[int, BaseException] = {}
        self._lock = threading.RLock()
        self._called = [0] * size
        self._open: dict[int, Meeting] = {}
        self._waiting: dict[int, Call] = {}
        self._failure: tuple[type[CommunicatorError], str] | None = None
        self._parts: dict[tuple[int, tuple[int, ...]], Group] = {}
        # Where a rank is that does not come may be another group: its calls are noted for all of them together.
        self._outer: Sequence[int] = range(size)  # this group's ranks, as numbers of the simulation
        self._everywhere: dict[int, Call] = {}

    def part(self, ranks: tuple[int, ...], time: int) -> "Group":
        """The group of some ranks: the same one for each that asks for the same ranks the same ``time``."""
        with self._lock:
            if (time, ranks) not in self._parts:
                part = self._parts[time, ranks] = Group(len(ranks), self.timeout, self.turn)
                part._outer, part._everywhere = [self._outer[rank] for rank in ranks], self._everywhere
                part.ended.update((ranks.index(rank), how) for rank, how in self.ended.items() if rank in ranks)
            return self._parts[time, ranks]

    def enter(self, rank: int, call: Call, tensor: Tensor) -> Meeting:
        """Let ``rank`` make its next call; returns at once."""
        with self._lock:
            number = self._called[rank]
            self._called[rank] += 1
            meeting = self._open.setdefault(number, Meeting(number, self._lock))
            meeting.enter(rank, call, tensor)
            if problem := _mismatch(meeting, call):
                self._fail(CollectiveMismatchError, problem)
            elif len(meeting.calls) == self.size and self._failure is None:
                self._close(meeting)
            return meeting

    def wait(self, rank: int, meeting: Meeting) -> Tensor:
        """Block until ``meeting`` has an outcome, and return this rank's."""
        if self.turn is None or self.is_decided(meeting):
            return self._wait(rank, meeting)
        self.turn.release()
        try:
            return self._wait(rank, meeting)
        finally:
            self.turn.acquire()

    def _wait(self, rank: int, meeting: Meeting) -> Tensor:
        with self._lock:
            self._waiting[rank] = self._everywhere[self._outer[rank]] = meeting.calls[rank]
            try:
                if not meeting.changed.wait_for(lambda: self._is_decided(meeting), self.timeout):
                    self._fail(CommunicatorError, self._time_limit(meeting))
            finally:
                del self._waiting[rank], self._everywhere[self._outer[rank]]
            if meeting.outcome is None:
                raise self._obstacle(rank, meeting)
            return meeting.outcome[rank]

    def is_decided(self, meeting: Meeting) -> bool:
        """Whether a rank would not have to wait for ``meeting``."""
        with self._lock:
            return self._is_decided(meeting)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Note that ``rank`` has returned, or raised ``error``."""
        with self._lock:
            self.ended[rank] = "returned" if error is None else f"ended with {type(error).__name__}: {error}"
            if error is not None:
                self.errors[rank] = error
            self._notify()
            for (_, ranks), part in self._parts.items():
                if rank in ranks:
                    part.end(ranks.index(rank), error)

    def stop(self, reason: str) -> None:
        """Fail whatever is still waited for."""
        with self._lock:
            self._fail(CommunicatorError, reason)
            for part in self._parts.values():
                part.stop(reason)

    def check_complete(self) -> None:
        """Raise CommunicatorError if a collective was called by some ranks and never by the others."""
        for part in self._parts.values():
            part.check_complete()
        for meeting in self._open.values():
            caller, call = next(iter(meeting.calls.items()))
            raise CommunicatorError(
                f"rank {caller} called {call}, which {listed(self._absent(meeting))} never did", alone=True
            )

    def _close(self, meeting: Meeting) -> None:
        del self._open[meeting.number]
        if problem := _uneven_pieces(meeting):
            self._fail(CollectiveMismatchError, problem)
        else:
            try:
                meeting.settle()
            except Exception as error:  # for example a dtype that torch cannot add
                self._fail(CommunicatorError, f"{next(iter(meeting.calls.values()))} failed: {error}")
        meeting.changed.notify_all()

    def _fail(self, kind: type[CommunicatorError], message: str) -> None:
        if self._failure is None:
            self._failure = kind, message
        self._notify()

    def _notify(self) -> None:
        for meeting in self._open.values():
            meeting.changed.notify_all()

    def _is_decided(self, meeting: Meeting) -> bool:
        absent_forever = any(rank in self.ended for rank in self._absent(meeting))
        return meeting.outcome is not None or self._failure is not None or absent_forever

    def _obstacle(self, rank: int, meeting: Meeting) -> CommunicatorError:
        """Why ``meeting`` has no outcome: each rank gets an exception object of its own."""
        if self._failure is not None:
            kind, message = self._failure
            return kind(message)
        gone = next(other for other in self.ended if other not in meeting.calls)
        return CommunicatorError(
            f"rank {gone} {self.ended[gone]} while rank {rank} was in {meeting.calls[rank]}", alone=True
        )

    def _time_limit(self, meeting: Meeting) -> str:
        waiting = listed([rank for rank in meeting.calls if rank in self._waiting])
        call = next(iter(meeting.calls.values()))
        absent = "; ".join(f"rank {rank} never came, it is {self._whereabouts(rank)}" for rank in self._absent(meeting))
        return f"time limit of {self.timeout} s: waiting in {call}: {waiting}; {absent}"

    def _whereabouts(self, rank: int) -> str:
        call = self._everywhere.get(self._outer[rank])
        return "in no collective" if call is None else f"waiting in {call}"

    def _absent(self, meeting: Meeting) -> list[int]:
        return [rank for rank in range(self.size) if rank not in meeting.calls]


def _mismatch(meeting: Meeting, newest: Call) -> str | None:
    if newest.agreed == next(iter(meeting.calls.values())).agreed:
        return None
    callers = alike((rank, str(call)) for rank, call in sorted(meeting.calls.items()))
    calls = "; ".join(f"{listed(ranks)} called {call}" for call, ranks in callers.items())
    return f"the ranks' calls number {meeting.number} differ: {calls}"


def _uneven_pieces(meeting: Meeting) -> str | None:
    for source, call in sorted(meeting.calls.items()):
        for target, rows in enumerate(call.splits or ()):
            expected = (meeting.calls[target].received or ())[source]
            if rows != expected:
                return f"{call}: rank {source} sends {rows} rows to rank {target}, which expects {expected}"
    return None


def _from_root(calls: list[Call], tensors: list[Tensor]) -> Sequence[Tensor]:
    return [tensors[calls[0].root or 0].clone()] * len(tensors)


def _sum(calls: list[Call], tensors: list[Tensor]) -> Sequence[Tensor]:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return [total] * len(tensors)


def _concatenate(calls: list[Call], tensors: list[Tensor]) -> Sequence[Tensor]:
    return [torch.cat(tensors)] * len(tensors)


def _exchange_pieces(calls: list[Call], tensors: list[Tensor]) -> Sequence[Tensor]:
    pieces = [torch.split_with_sizes(tensor, call.splits or ()) for call, tensor in zip(calls, tensors, strict=True)]
    return [torch.cat(received) for received in zip(*pieces, strict=True)]


def _rotate(calls: list[Call], tensors: list[Tensor]) -> Sequence[Tensor]:
    return [tensors[rank - 1].clone() for rank in range(len(tensors))]


_COMPUTE: dict[Ability, Callable[[list[Call], list[Tensor]], Sequence[Tensor]]] = {
    "broadcast": _from_root,
    "allreduce": _sum,
    "allgather": _concatenate,
    "alltoall": _exchange_pieces,
    "shift": _rotate,
}
