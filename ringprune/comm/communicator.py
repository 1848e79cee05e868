"""What every communicator can do: the protocol the stages are written against, and its byte counter.

A communicator moves tensors and sums them. It knows no policy, residual or density, and it never averages.
Calls return at once with a handle; ``handle.wait()`` gives the result. All ranks make the same calls in the same
order, and a tensor given to a call is not touched until its handle has been waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch import Tensor

__all__ = ["ASKED", "Ability", "Communicator", "Handle", "Nodes", "Traffic", "is_communicator"]

Ability = Literal["broadcast", "allreduce", "group", "allgather", "alltoall", "shift", "barrier", "divide"]

ASKED = frozenset({"mpi"})
"""Kinds of communicators whose messages move on only while somebody asks."""

CPU = torch.device("cpu")


class Handle(Protocol):
    """A collective under way."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        ...

    def wait(self) -> Tensor:
        """Block until the collective is done and return its result.

        Raises:
            CommunicatorError: the collective failed, a rank is gone, or the time limit was reached;
                the message names the collective.
        """
        ...


class Traffic:
    """Counts what one rank hands to the network.

    Who forwards what inside a broadcast or an allreduce is the library's choice; the mean over the ranks is the same
    for every bandwidth-optimal algorithm, and that mean is counted. Kept times ``size`` so that it stays an integer.

    Attributes:
        size: number of ranks.
        payload_bytes: bytes of the messages themselves, whatever the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.payload_bytes = 0
        self._bytes_times_size = 0

    @property
    def bytes_sent(self) -> float:
        """Bytes sent by this rank (mean over the ranks for broadcast, allreduce and allgather)."""
        return self._bytes_times_size / self.size

    def count_broadcast(self, payload: int) -> None:
        """A message of ``payload`` bytes goes from one rank to all: (P-1)/P of it per rank."""
        self._add(payload, (self.size - 1) * payload)

    def count_allreduce(self, payload: int) -> None:
        """A buffer of ``payload`` bytes is summed: 2(P-1)/P of it per rank."""
        self._add(payload, 2 * (self.size - 1) * payload)

    def count_allgather(self, payload: int) -> None:
        """All ranks together contribute ``payload`` bytes, everybody gets them: (P-1)/P of it per rank."""
        self._add(payload, (self.size - 1) * payload)

    def count_own(self, payload: int) -> None:
        """This rank itself sends ``payload`` bytes to others (shift, alltoall)."""
        self._add(payload, self.size * payload)

    def _add(self, payload: int, bytes_times_size: int) -> None:
        self.payload_bytes += payload
        self._bytes_times_size += bytes_times_size


class Communicator(Protocol):
    """A group of ranks that can sum and exchange tensors.

    Tensors are contiguous. ``name`` is what errors call the collective, for example ``"bucket 3 values"``; two
    collectives under way at the same time have different names.

    Attributes:
        kind: ``"horovod"``, ``"mpi"``, ``"torch"`` or ``"simulated"``.
        rank: number of this rank, 0 to ``size - 1``.
        size: number of ranks.
        abilities: the calls that work here; ``shift`` needs point-to-point messages, ``divide`` groups of some ranks,
            ``group`` (of ``allreduce_group``) a library that gathers tensors into messages by itself. ``barrier`` works
            everywhere and is not named.
        traffic: the byte counter.
        threads: whether calls may come from several threads, one at a time.
    """

    kind: str
    rank: int
    size: int
    abilities: frozenset[Ability]
    traffic: Traffic
    threads: bool

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Handle:
        """Overwrite ``tensor`` on every rank with the one on rank ``root``; the handle returns ``tensor``."""
        ...

    def allreduce(self, tensor: Tensor, *, name: str) -> Handle:
        """Overwrite ``tensor`` with the sum over the ranks, the same bytes everywhere; the handle returns it."""
        ...

    def allreduce_group(self, tensors: Sequence[Tensor], *, factor: float = 1.0, name: str) -> Handle:
        """Overwrite each of ``tensors`` with the sum over the ranks times ``factor``; the handle returns the first.

        Args:
            tensors: one or more, of one dtype and device; they share no memory.
            factor: rounded to the tensors' dtype.
            name: what errors call this collective.
        """
        ...

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int] | None = None, name: str) -> Handle:
        """Concatenate the ranks' tensors along dimension 0 in rank order; the handle returns a new tensor.

        Args:
            tensor: shape ``(n, ...)``; all but the first dimension are equal on all ranks.
            sizes: first dimension on each rank, where they differ; None where all are equal.
            name: what errors call this collective.
        """
        ...

    def alltoall(
        self,
        tensor: Tensor,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        name: str,
    ) -> Handle:
        """Send the j-th piece of ``tensor`` to rank j; the handle returns the pieces received, in rank order.

        Args:
            tensor: shape ``(n, ...)``.
            splits: rows for each rank, summing to n; None divides evenly.
            received: rows coming from each rank; None where it is divided evenly.
            name: what errors call this collective.
        """
        ...

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> Handle:
        """Send ``tensor`` to rank + 1, receive from rank - 1 (mod size) into ``into``; the handle returns ``into``."""
        ...

    def progress(self) -> None:
        """Let what is under way go on, where a library moves messages only while it is called; returns at once."""
        ...

    def barrier(self, *, name: str) -> None:
        """Return once all ranks have called this.

        For calls that some ranks may make, by mistake, while others are in another one. Where a library matches
        collectives by their order alone it takes one for the other, and crashes. What a barrier sends meets no other
        call: the ranks wait for each other, with warnings and a time limit.
        """
        ...

    def divide(self, device: torch.device = CPU) -> "Nodes":
        """Communicators of the ranks of each node, and of the nodes' first ranks; all ranks call this.

        Args:
            device: where this communicator carries tensors.

        Raises:
            ConfigurationError: on all ranks, where the library was not started for groups; says how to.
        """
        ...

    def duplicate(self) -> "Communicator":
        """Another communicator of the same ranks, whose messages do not meet those of this one; all ranks call this.

        For what sends at other times than the exchange. It is closed with this one, and counts its own bytes.

        Raises:
            ConfigurationError: on all ranks, where the library cannot make one.
        """
        ...

    def close(self) -> None:
        """Give back what the communicator holds, and what it was divided into. Collective where the library's is."""
        ...


MEMBERS = frozenset({*Communicator.__annotations__, *(name for name in vars(Communicator) if name[0] != "_")})


def is_communicator(thing: Any) -> TypeGuard[Communicator]:
    """Whether it can do all that a communicator can, also one that hands calls on by ``__getattr__``.

    From Python 3.12 on ``isinstance`` with a protocol does not see what ``__getattr__`` gives.
    """
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in MEMBERS)


@dataclass(frozen=True)
class Nodes:
    """A communicator's ranks, divided by the node that they run on.

    Attributes:
        local: the ranks of this node, in their order.
        across: the first rank of every node, in their order; None on all other ranks.
        count: number of nodes.
    """

    local: Communicator
    across: Communicator | None
    count: int
