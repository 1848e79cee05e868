"""What every method gives to the comparison: a step that can be timed, and an account of it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exchanges.messages import Recorder

__all__ = ["Account", "Exchange", "allreduce_bytes"]


@dataclass(frozen=True)
class Account:
    """Sums since the exchange was built, of this rank; bytes are the mean over the ranks.

    Attributes:
        sent: bytes handed to the network, by the method's own account; None where it keeps none.
        values: those of values, without indices and headers.
        computing: seconds outside of communication: selection, packing, unpacking; None where nobody can tell.
        density: share of a compressed tensor's entries meant to be sent.
        realised_density: share of them that was sent.
    """

    sent: float | None
    values: float | None
    computing: float | None = None
    density: float = 1.0
    realised_density: float = 1.0


class Exchange(Protocol):
    """A method on one rank.

    Attributes:
        messages: what its messages go through; None where they are a library's own.
    """

    messages: Recorder | None

    def prepare(self) -> Tensor:
        """Everything before the backward pass; returns the loss."""
        ...

    def run(self, loss: Tensor) -> None:
        """The backward pass and what is left of the exchange; afterwards every gradient is the average."""
        ...

    def account(self) -> Account:
        """The account so far."""
        ...

    def close(self) -> None:
        """Give back what it holds, so that another one can be built in this process."""
        ...


def allreduce_bytes(entries: int, bytes_each: int, ranks: int) -> float:
    """What a bandwidth-optimal allreduce sends per rank: 2 (P - 1) / P of the buffer."""
    return 2 * (ranks - 1) / ranks * entries * bytes_each
