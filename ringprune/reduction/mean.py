"""What is made of the ranks' values: their average or sum; the only place that divides by the number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.reduction.coded import CodedReduction
from ringprune.reduction.reduction import GroupReduction, LibraryReduction, Reduction, ValueCode
from ringprune.reduction.ring import RingReduction

__all__ = ["Average", "Mean"]


@dataclass(frozen=True)
class Mean:
    """What is made of the ranks' values.

    Args:
        average: divide the sum by the number of ranks (Horovod's ``op=Average``), or leave it (``op=Sum``).
        predivide: divide by this before the sum and multiply after it (Horovod's ``gradient_predivide_factor``).
    """

    average: bool = True
    predivide: float = 1.0

    def scale(self, sums: Tensor, size: int) -> None:
        """Make averages of the sums over ``size`` ranks, in place, where :meth:`start` was not used."""
        if self.average:
            sums.mul_(1.0 / size)

    def start(
        self,
        comm: Communicator,
        values: Tensor,
        code: ValueCode | None = None,
        *,
        ring: bool = False,
        room: Tensor | None = None,
        name: str,
    ) -> "Average":
        """[6] Start the reduction of ``values``, in place.

        Args:
            comm: with whom.
            values: contiguous; float32 where there is a ``code``.
            code: how values travel; None as they are. Where a code would not be shorter it is not used.
            ring: sum float32 values by our ring instead of the library's allreduce.
            room: float32, as many entries: memory that may be used for what rounding drops; None makes some. Where it
                is ``values`` itself, these are no more what they were, and no sums.
            name: what errors call it.
        """
        if self.predivide != 1.0:
            values.mul_(1.0 / self.predivide)
        return Average(_reduction(comm, values, code, ring, room, name), self._factor(comm.size), self.predivide)

    def start_group(self, comm: Communicator, tensors: Sequence[Tensor], *, name: str) -> "Average":
        """[6] Start the reduction of each of ``tensors``, in place; the library scales them too.

        Args:
            comm: with whom; has the ability ``"group"``.
            tensors: contiguous.
            name: what errors call it.
        """
        if self.predivide != 1.0:
            for tensor in tensors:
                tensor.mul_(1.0 / self.predivide)
        return Average(GroupReduction(comm, tensors, self._factor(comm.size), name=name), 1.0, self.predivide)

    def _factor(self, size: int) -> float:
        # Horovod multiplies by the reciprocal, rounded to the values' dtype; the same here gives the same bits.
        return self.predivide / size if self.average else self.predivide


def _reduction(
    comm: Communicator, values: Tensor, code: ValueCode | None, ring: bool, room: Tensor | None, name: str
) -> Reduction:
    longest = -(-values.numel() // comm.size)
    if code is not None and code.size(longest) >= values.element_size() * longest:
        code = None
    if code is not None and not ring:
        return CodedReduction(comm, values, code, room=room, name=name)
    if room is values:
        values = values.clone()
    return RingReduction(comm, values, code, name=name) if ring else LibraryReduction(comm, values, name=name)


class Average:
    """A reduction under way whose sum is multiplied by a factor.

    Args:
        reduction: the sum.
        factor: what it is multiplied by.
        predivide: what the values were divided by before.
    """

    def __init__(self, reduction: Reduction, factor: float, predivide: float) -> None:
        self._reduction, self._factor, self._predivide = reduction, factor, predivide

    @property
    def unfinished(self) -> bool:
        """Whether another message has to be started after the one under way."""
        return self._reduction.unfinished

    def done(self) -> bool:
        """Whether the message under way is there."""
        return self._reduction.done()

    def advance(self) -> None:
        """Wait for the message under way and start the next."""
        self._reduction.advance()

    def wait(self) -> Tensor:
        """The averages, the same bytes on every rank."""
        values = self._reduction.wait()
        return values if self._factor == 1.0 else values.mul_(self._factor)

    def wait_for_sum(self) -> tuple[Tensor, float]:
        """The sum, and the factor that makes averages of it, for who copies them anyway."""
        return self._reduction.wait(), self._factor

    def parts_of_sum(self) -> tuple[Iterator[tuple[int, Tensor]], float]:
        """The same in parts: where each begins, and its sums, which are overwritten by the next."""
        return self._reduction.parts(), self._factor

    @property
    def rest(self) -> Tensor | None:
        """What rounding has dropped of this rank's share, one entry per value; None where nothing was rounded."""
        rest = self._reduction.rest
        return rest if rest is None or self._predivide == 1.0 else rest * self._predivide

    def drain(self) -> None:
        """Wait and forget: the step is not made."""
        self._reduction.drain()
