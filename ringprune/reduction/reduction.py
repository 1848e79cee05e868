"""What every way of summing values offers, and the plainest: the library's own allreduce."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from ringprune.comm.communicator import Communicator

__all__ = ["GroupReduction", "LibraryReduction", "Reduction", "ValueCode"]


class ValueCode(Protocol):
    """How values travel; see :class:`ringprune.wire.ValueCode`."""

    def size(self, count: int) -> int:
        """Bytes of a message of ``count`` values."""
        ...

    def encode(self, values: Tensor, rest: Tensor, message: Tensor | None = None) -> Tensor:
        """The message of some values, uint8, on the CPU; ``rest`` is overwritten with what rounding drops."""
        ...

    def decode(self, message: Tensor, into: Tensor, *, add: bool = False, name: str) -> Tensor:
        """Write or add the values of a message into ``into``, which is returned."""
        ...


class Reduction(Protocol):
    """A sum under way. Ranks advance their reductions in the same order."""

    @property
    def rest(self) -> Tensor | None:
        """After :meth:`wait`: what rounding dropped on this rank, one entry per value; None where nothing was rounded.

        The ranks' values sum up to the result and the sum of the ranks' rests.
        """
        ...

    @property
    def unfinished(self) -> bool:
        """Whether another message has to be started after the one under way."""
        ...

    def done(self) -> bool:
        """Whether the message under way is there, so that :meth:`advance` or :meth:`wait` does not wait."""
        ...

    def advance(self) -> None:
        """Wait for the message under way and start the next."""
        ...

    def wait(self) -> Tensor:
        """The sum, the same bytes on every rank."""
        ...

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """As :meth:`wait`, in parts: where each begins, and its sums, which are overwritten by the next."""
        ...

    def drain(self) -> None:
        """Wait for what is under way and forget it; called on all ranks or on none."""
        ...


class LibraryReduction:
    """The communicator's own allreduce, in place.

    Args:
        comm: with whom.
        values: what is summed; overwritten.
        name: what errors call it.
    """

    rest = None
    unfinished = False

    def __init__(self, comm: Communicator, values: Tensor, *, name: str) -> None:
        self._handle = comm.allreduce(values, name=name)

    def done(self) -> bool:
        """Whether the sum is there."""
        return self._handle.done()

    def advance(self) -> None:
        """Nothing is left to start."""

    def wait(self) -> Tensor:
        """The sum."""
        return self._handle.wait()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """All of it."""
        yield 0, self.wait()

    def drain(self) -> None:
        """Wait and forget."""
        self._handle.wait()


class GroupReduction(LibraryReduction):
    """The communicator's own allreduce of several tensors where they are, which gathers and scales them by itself.

    Args:
        comm: with whom; has the ability ``"group"``.
        tensors: what is summed; overwritten.
        factor: what the sums are multiplied by.
        name: what errors call it.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], factor: float, *, name: str) -> None:
        self._handle = comm.allreduce_group(tensors, factor=factor, name=name)
