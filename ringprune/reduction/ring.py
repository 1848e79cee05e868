"""Stage 6: sum packed values over the ranks by a pipelined ring, in float32 or coded on every hop.

The values are cut into as many regions as there are ranks. In each of ``2 (P-1)`` hops every rank sends one region to
the next rank and gets the one before it: for ``P-1`` hops what comes is added to the rank's own values
(reduce-scatter), then finished regions travel once around (allgather). Regions are cut into chunks, several of which
are under way at once.
After: P. Patarasu, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator, Handle
from ringprune.devices import to_device
from ringprune.errors import CommunicatorError
from ringprune.reduction.reduction import ValueCode

__all__ = ["CHUNK_VALUES", "IN_FLIGHT", "RingReduction", "chunk_counts"]

CHUNK_VALUES = 1 << 18
"""Most values of a chunk, a multiple of the blocks of value codes."""

IN_FLIGHT = 16
"""Most shifts under way at once in one ring."""

BLOCK = 256


def chunk_counts(numel: int, size: int) -> tuple[int, ...]:
    """Values of each chunk of a region, the same for all regions: what the bytes of a ring follow from.

    Args:
        numel: values that are summed.
        size: number of ranks.
    """
    region = -(-numel // size)
    if region == 0:
        return ()
    even = -(-region // -(-region // CHUNK_VALUES))
    chunk = min(region, -(-even // BLOCK) * BLOCK)
    return tuple(min(chunk, region - begin) for begin in range(0, region, chunk))


class RingReduction:
    """A sum over the ranks under way, on ``comm.shift`` alone.

    Making it starts the first shifts; :meth:`wait` does the rest. Several may be started before the first is waited
    for; all ranks start, and wait for, the same ones in the same order. Which shift comes next never depends on which
    is done, so the calls of all ranks match one by one, whatever else is under way.

    Args:
        comm: a communicator with the ability ``"shift"``.
        values: float32, shape ``(n,)``, contiguous, as many on every rank; overwritten with the sum.
        code: how values travel; None is float32.
        name: what errors call the reduction.

    Attributes:
        rest: what the codings on this rank have dropped, float32, shape ``(n,)``; None without a code. Complete after
            :meth:`wait`. The ranks' contributions add up to the result and all ranks' ``rest``.
    """

    unfinished = False

    def __init__(self, comm: Communicator, values: Tensor, code: ValueCode | None, *, name: str) -> None:
        self._comm = comm
        self._code = code
        self._name = name
        self._counts = chunk_counts(values.numel(), comm.size)
        self._values = _Regions(values, comm.size, self._counts)
        self.rest = None if code is None else torch.zeros_like(values)
        self._rests = None if self.rest is None else _Regions(self.rest, comm.size, self._counts)
        self._under_way: deque[_Shift] = deque()
        self._spare: list[Tensor] = []
        self._finished: dict[int, Tensor] = {}  # by chunk: the message of the region that is passed on
        self._damaged: set[tuple[int, int]] = set()
        self._error: CommunicatorError | None = None
        self._started = 0
        self._total = 2 * (comm.size - 1) * len(self._counts)
        # A chunk can be sent on when it has come: at most the chunks of one hop are under way.
        self._window = min(IN_FLIGHT, len(self._counts))
        while len(self._under_way) < min(self._window, self._total):
            self._start_next()

    def done(self) -> bool:
        """Whether the first of the shifts under way is over."""
        return not self._under_way or self._under_way[0].handle.done()

    def advance(self) -> None:
        """Nothing is left to others to start: :meth:`wait` starts each shift when the one before it is done."""

    def wait(self) -> Tensor:
        """Block until the sum is complete.

        Returns:
            ``values``, the same bytes on every rank.

        Raises:
            CommunicatorError: a rank is gone, the time limit was reached, or a message was damaged. The ring is run to
                its end before a damaged message is reported, and every rank that it passes reports it.
        """
        while self._under_way:
            self._finish_oldest()
            if self._started < self._total:
                self._start_next()
        if self._comm.size == 1 and self._code is not None:
            for chunk in range(len(self._counts)):
                self._own_message(0, chunk)
        self._values.write_back()
        if self._rests is not None:
            self._rests.write_back()
        if self._error is not None:
            raise self._error
        return self._values.whole

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """All of it."""
        yield 0, self.wait()

    def drain(self) -> None:
        """Run to the end and forget: the step is not made. No rank is left waiting for this one."""
        self.wait()

    def _start_next(self) -> None:
        hop, chunk = divmod(self._started, len(self._counts))
        region = (self._comm.rank - hop) % self._comm.size
        sent = self._outgoing(hop, region, chunk)
        into = self._incoming(hop, (region - 1) % self._comm.size, chunk, sent)
        name = f"{self._name}, hop {hop + 1} of {2 * (self._comm.size - 1)}, chunk {chunk + 1}"
        self._under_way.append(_Shift(self._comm.shift(sent, into, name=name), hop, chunk, sent, into))
        self._started += 1

    def _outgoing(self, hop: int, region: int, chunk: int) -> Tensor:
        if self._code is None:
            return self._values.chunk(region, chunk)
        if hop < self._comm.size - 1:
            return self._encoded(self._code, region, chunk)
        return self._own_message(region, chunk) if hop == self._comm.size - 1 else self._finished[chunk]

    def _incoming(self, hop: int, region: int, chunk: int, sent: Tensor) -> Tensor:
        """Where a chunk is received: float32 values of a finished region where they belong, all else aside."""
        if self._code is None and hop >= self._comm.size - 1:
            return self._values.chunk(region, chunk)
        for place, buffer in enumerate(self._spare):
            if buffer.numel() == sent.numel():
                return self._spare.pop(place)
        return torch.empty_like(sent)

    def _finish_oldest(self) -> None:
        shift = self._under_way[0]
        shift.handle.wait()
        self._under_way.popleft()
        region = (self._comm.rank - shift.hop - 1) % self._comm.size
        if shift.hop < self._comm.size - 1:
            if self._code is None:
                self._values.chunk(region, shift.chunk).add_(shift.into)
            else:
                self._decode(self._code, shift.into, region, shift.chunk, add=True)
            self._spare.append(shift.into)
        elif self._code is not None:
            self._decode(self._code, shift.into, region, shift.chunk)
            self._finished[shift.chunk] = shift.into  # passed on as it came
            self._spare.append(shift.sent)

    def _own_message(self, region: int, chunk: int) -> Tensor:
        """The message of a region that is complete on this rank, which keeps of it what the others will get."""
        assert self._code is not None
        message = self._encoded(self._code, region, chunk)
        self._decode(self._code, message, region, chunk)
        return message

    def _encoded(self, code: ValueCode, region: int, chunk: int) -> Tensor:
        assert self._rests is not None
        values = self._values.chunk(region, chunk)
        message = to_device(code.encode(values, self._rests.chunk(region, chunk)), values.device)
        # What rests on a damaged message is damaged on purpose, so that no rank takes it for a sum.
        return torch.zeros_like(message) if (region, chunk) in self._damaged else message

    def _decode(self, code: ValueCode, message: Tensor, region: int, chunk: int, *, add: bool = False) -> None:
        """Write the values of a message where they belong, or add them."""
        name = f"{self._name}, region {region}, chunk {chunk + 1}"
        try:
            code.decode(message, self._values.chunk(region, chunk), add=add, name=name)
        except CommunicatorError as error:
            error.alone = True  # of ranks that it does not pass
            self._error = self._error or error
            self._damaged.add((region, chunk))


class _Shift(NamedTuple):
    """A chunk on its way."""

    handle: Handle
    hop: int
    chunk: int
    sent: Tensor
    into: Tensor


class _Regions:
    """A tensor cut into as many regions as ranks, each into chunks of the same lengths.

    The last values seldom fill their chunk, and chunks behind them are empty: these are kept aside, padded with zeros.

    Args:
        whole: shape ``(n,)``.
        size: number of ranks.
        counts: lengths of the chunks of a region.
    """

    def __init__(self, whole: Tensor, size: int, counts: tuple[int, ...]) -> None:
        self.whole = whole
        self._padded: list[tuple[int, Tensor]] = []
        self._chunks: list[list[Tensor]] = []
        begin = 0
        for _ in range(size):
            self._chunks.append([])
            for count in counts:
                self._chunks[-1].append(self._cut(begin, count))
                begin += count

    def chunk(self, region: int, chunk: int) -> Tensor:
        """The values of a chunk: a view, or padded and kept aside."""
        return self._chunks[region][chunk]

    def write_back(self) -> None:
        """Write what is kept aside to where it belongs."""
        for begin, padded in self._padded:
            self.whole[begin:] = padded[: max(0, self.whole.numel() - begin)]

    def _cut(self, begin: int, count: int) -> Tensor:
        present = self.whole[begin : begin + count]
        if present.numel() == count:
            return present
        padded = self.whole.new_zeros(count)
        padded[: present.numel()] = present
        self._padded.append((begin, padded))
        return padded
