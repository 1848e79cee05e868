"""What sums of sparse contributions have in common: several messages in turn, and the check of what is given."""

from abc import ABC, abstractmethod
from collections.abc import Generator

import torch
from torch import Tensor

from ringprune.comm.communicator import Handle
from ringprune.errors import ArgumentTypeError, ConfigurationError, RingPruneError
from ringprune.reduction.merge import ascending_within

__all__ = ["PhasedSum", "entries_fault"]


class PhasedSum(ABC):
    """A sum of sparse contributions that takes several messages, of which the first is under way.

    Args:
        messages: how many there are.
    """

    def __init__(self, messages: int) -> None:
        self._left = messages - 1
        self._phases = self._run()
        self._error: RingPruneError | None = None
        self._handle = self._next()

    @abstractmethod
    def _run(self) -> Generator[Handle, None, tuple[Tensor, Tensor]]:
        """Yield each message when it has been started, go on when it has been waited for; return the sums."""

    @property
    def unfinished(self) -> bool:
        """Whether another message has to be started after the one under way."""
        return self._left > 0

    def done(self) -> bool:
        """Whether the message under way is there."""
        return self._handle.done()

    def advance(self) -> None:
        """Wait for the message under way and start the next; raises as :meth:`wait` does."""
        self._handle.wait()
        self._handle = self._next()
        self._left -= 1

    def _next(self) -> Handle:
        if self._error is not None:
            raise self._error
        try:
            return next(self._phases)
        except RingPruneError as error:
            self._error = error  # a generator that has raised is over, and tells no second time
            raise

    def wait(self) -> tuple[Tensor, Tensor]:
        """Block until the sums are complete.

        Returns:
            Indices, int32, ascending: all that the ranks have, or those that are kept; and their sums, float32. The
            same bytes on every rank; -0.0 counts as 0.0.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's indices and values cannot be summed.
            CommunicatorError: another rank's cannot, a message was damaged, a rank is gone, or the time limit was
                reached. What is wrong with one rank's entries raises on all ranks. Raised again, as often as asked.
        """
        while self.unfinished:
            self.advance()
        self._handle.wait()
        try:
            self._next()
        except StopIteration as end:
            sums: tuple[Tensor, Tensor] = end.value
            return sums
        raise AssertionError("a message more than there are")

    def drain(self) -> None:
        """Run to the end and forget: the step is not made. No rank is left waiting for this one."""
        self.wait()


def entries_fault(indices: Tensor, values: Tensor, numel: int, name: str) -> RingPruneError | None:
    """What is wrong with this rank's arguments."""
    if indices.dtype != torch.int32 or values.dtype != torch.float32:
        return ArgumentTypeError(
            f"{name}: indices are {indices.dtype}, values {values.dtype}; needed: int32 and float32"
        )
    if indices.shape != values.shape or indices.dim() != 1 or indices.is_cuda or values.is_cuda:
        return ConfigurationError(
            f"{name}: indices {tuple(indices.shape)} on {indices.device}, values {tuple(values.shape)} on "
            f"{values.device}; needed: one dimension, as many of both, in CPU memory"
        )
    if not ascending_within(indices.numpy(), numel):
        return ConfigurationError(f"{name}: the indices have to ascend, each once, within 0 to {numel - 1}")
    return None
