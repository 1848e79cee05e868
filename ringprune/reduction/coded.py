"""Sums of values that travel coded: each rank sums one region and sends the result to all.

Two collectives of bytes, which every communicator moves whatever the code: an alltoall of the regions and an allgather
of their sums. Sums are made in float32, so that a value is rounded twice, whatever the number of ranks: where it comes
from, and as part of the sum. Both rests are kept, by the rank that rounded.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator, Handle
from ringprune.devices import to_device
from ringprune.errors import CommunicatorError
from ringprune.reduction.reduction import ValueCode

__all__ = ["CodedReduction"]


class CodedReduction:
    """A sum of float32 values that travel in fewer bits.

    Args:
        comm: with whom.
        values: float32, shape ``(n,)``, as many on every rank; overwritten with the sum, where not with ``rest``.
        code: how they travel.
        room: float32, shape ``(n,)``: memory for ``rest``, perhaps ``values`` itself; None makes some.
        name: what errors call it.

    Attributes:
        rest: float32, shape ``(n,)``: what rounding dropped on this rank.
        unfinished: the sums have still to be sent.
    """

    def __init__(
        self, comm: Communicator, values: Tensor, code: ValueCode, *, room: Tensor | None = None, name: str
    ) -> None:
        self._comm, self._values, self._code, self._name = comm, values, code, name
        ends = [values.numel() * rank // comm.size for rank in range(comm.size + 1)]
        self._regions = [slice(a, b) for a, b in pairwise(ends)]
        self._numels = [b - a for a, b in pairwise(ends)]
        self.rest = torch.empty_like(values) if room is None else room
        self._within = self.rest.data_ptr() == values.data_ptr()  # then the sums go elsewhere
        self.unfinished = True
        self._error: CommunicatorError | None = None
        self._handle = self._scatter() if comm.size > 1 else None

    def _scatter(self) -> Handle:
        """Send every other rank its region of this rank's values; the own region stays as it is."""
        rank, size = self._comm.rank, self._comm.size
        sent = [0 if other == rank else self._code.size(n) for other, n in enumerate(self._numels)]
        pieces = torch.from_numpy(np.zeros(sum(sent), np.uint8))
        for other, (region, piece) in enumerate(zip(self._regions, torch.split(pieces, sent), strict=True)):
            if other != rank:
                self._code.encode(self._values[region], self.rest[region], piece)
                self._comm.progress()
        own = self._code.size(self._numels[rank])
        received = [0 if other == rank else own for other in range(size)]
        pieces = to_device(pieces, self._values.device)
        return self._comm.alltoall(pieces, splits=sent, received=received, name=f"{self._name}, scattered")

    def done(self) -> bool:
        """Whether the message under way is there."""
        return self._handle is None or self._handle.done()

    def advance(self) -> None:
        """Sum this rank's region once its pieces are there, and start to send the sum."""
        if not self.unfinished:
            return
        self.unfinished = False
        own = self._regions[self._comm.rank]
        try:
            total = self._values[own] if self._handle is None else self._sum(self._handle.wait())
            message = to_device(self._code.encode(total, self.rest[own]), total.device)
        except CommunicatorError as error:
            # Only this rank has seen it, and the others wait for the sum: what they get tells them that there is none.
            self._error = error
            message = self._values.new_zeros(self._code.size(self._numels[self._comm.rank]), dtype=torch.uint8)
        sizes = [self._code.size(n) for n in self._numels]
        self._handle = self._comm.allgather(message, sizes=sizes, name=f"{self._name}, gathered")

    def _sum(self, received: Tensor) -> Tensor:
        rank, count = self._comm.rank, self._numels[self._comm.rank]
        pieces: Sequence[Tensor] = torch.split(received, self._code.size(count))
        total = self._values[self._regions[rank]]
        others = (other for other in range(self._comm.size) if other != rank)
        for other, piece in zip(others, pieces, strict=True):
            self._code.decode(piece, total, add=True, name=f"{self._name} from rank {other}")
            self._comm.progress()
        return total

    def wait(self) -> Tensor:
        """The sum, the same bytes on every rank.

        Raises:
            CommunicatorError: a message was damaged; on all ranks.
        """
        into = torch.empty_like(self._values) if self._within else self._values
        for region, message, name in self._gathered():
            self._code.decode(message, into[region], name=name)
        return into

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """As :meth:`wait`, region by region: where it begins, and its sums, which are overwritten by the next."""
        if self._values.is_cuda:  # what a launch costs weighs more than another pass
            yield 0, self.wait()
            return
        room = torch.empty(max(self._numels), dtype=torch.float32, device="cpu")
        for region, message, name in self._gathered():
            yield region.start, self._code.decode(message, room[: region.stop - region.start], name=name)

    def _gathered(self) -> Iterator[tuple[slice, Tensor, str]]:
        """Each region, the message of its sums, and what errors call that."""
        self.advance()
        assert self._handle is not None
        gathered = self._handle.wait()
        if self._error is not None:
            raise self._error
        messages = torch.split(gathered, [self._code.size(n) for n in self._numels])
        for rank, (region, message) in enumerate(zip(self._regions, messages, strict=True)):
            yield region, message, f"sum of {self._name} from rank {rank}"
            self._comm.progress()

    def drain(self) -> None:
        """Wait for the message under way and forget it."""
        if self._handle is not None:
            self._handle.wait()
