"""Stage 6: the largest sums of entries that every rank proposes, found by all ranks together.

Every rank sends each entry it proposes to the rank that the entry is dealt to (``dealt.py``); that rank adds what
arrives, in rank order, and sends its share of the largest sums to all. After: S. Li and T. Hoefler, "Near-Optimal
Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (arXiv 2201.07598).
"""

from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringprune.comm.communicator import Communicator, Handle
from ringprune.errors import CommunicatorError, RingPruneError
from ringprune.reduction.dealt import Dealing
from ringprune.reduction.merge import Pairs, add_pairs
from ringprune.reduction.phased import PhasedSum, entries_fault

__all__ = ["BalancedReduction", "Judge", "PairCode"]

REFUSED = -1
"""Told instead of a number of entries by a rank that cannot go on."""

Judge = Callable[[Tensor, Tensor, int], Tensor]
"""Of indices (int32, ascending), sums (float32) and a number: the places of at most so many to keep, ascending."""


class PairCode(Protocol):
    """How pairs travel; see :class:`ringprune.wire.PairCode`."""

    def size(self, count: int) -> int:
        """Bytes of a message of ``count`` pairs."""
        ...

    def encode(self, indices: NDArray[np.int32], values: NDArray[np.float32], rest: NDArray[np.float32]) -> Tensor:
        """The message of some pairs; ``rest`` is overwritten with what rounding drops."""
        ...

    def decode(self, message: Tensor, count: int, *, name: str) -> Pairs:
        """The pairs of a message."""
        ...


class BalancedReduction(PhasedSum):
    """The largest sums of sparse contributions, under way: an alltoall to those who add, an allgather of what is kept.

    Every rank that has a hand keeps the same part of it. As entries are dealt by a hash, what each of them finds
    largest among its own is nearly what is largest among all.

    Making it starts the first message. All ranks make, advance and wait for the same ones in the same order. The first
    tells every rank its own numbers: one that is nonsense raises where it came, and the others wait for that rank as
    for one that is gone.

    Args:
        comm: the communicator.
        indices: int32, shape ``(n,)``, ascending, in the range; ``n`` may differ from rank to rank. In CPU memory.
        values: float32, shape ``(n,)``, in CPU memory.
        dealing: the range, who adds what, and how much is kept; the same on every rank.
        judge: which of the sums that this rank adds are to be kept.
        code: how pairs travel; its indices are below ``dealing.groups``.
        name: what errors call the reduction.

    Attributes:
        rest: float32, shape ``(n,)``: what rounding dropped of this rank's values; this and ``own_rest`` are what is
            missing in the sums.
        own_rest: float32, one for each: what rounding dropped of their sums.
    """

    def __init__(
        self,
        comm: Communicator,
        indices: Tensor,
        values: Tensor,
        *,
        dealing: Dealing,
        judge: Judge,
        code: PairCode,
        name: str,
    ) -> None:
        self._comm, self._dealing, self._judge, self._code, self._name = comm, dealing, judge, code, name
        self._fault: RingPruneError | None = entries_fault(indices, values, dealing.numel, name)
        self.rest, self.own_rest = (
            torch.zeros(0, dtype=torch.float32, device="cpu"),
            torch.zeros(0, dtype=torch.float32, device="cpu"),
        )
        self._own_places = np.empty(0, np.int32)
        if self._fault is None:
            self._dealt = dealing.deal(indices.numpy())
            places, flat = dealing.places(indices.numpy()), values.detach().numpy()
            self._pieces = [(places[mine], flat[mine]) for mine in self._dealt]
            self.rest = torch.zeros(values.numel(), dtype=torch.float32, device="cpu")
        super().__init__(messages=3)

    @property
    def own_indices(self) -> Tensor:
        """int32: what was kept of the entries dealt to this rank."""
        return torch.from_numpy(self._dealing.indices(self._own_places, self._comm.rank))

    def _run(self) -> Generator[Handle, None, tuple[Tensor, Tensor]]:
        told = [REFUSED] * self._comm.size if self._fault is not None else [len(mine) for mine in self._dealt]
        message = torch.tensor(told, dtype=torch.int32, device="cpu")
        handle = self._comm.alltoall(message, name=f"{self._name}: number of entries")
        yield handle
        counts = self._check(handle.wait().tolist())
        pieces = self._scatter(counts)
        yield pieces
        gathered = self._keep(pieces.wait(), counts)
        yield gathered
        return self._joined(gathered.wait())

    def _check(self, counts: list[int]) -> list[int]:
        """How many entries each rank sends here. A rank that cannot go on has told so to all."""
        if self._fault is not None:
            raise self._fault
        refused = [rank for rank, count in enumerate(counts) if count == REFUSED]
        if refused:
            raise CommunicatorError(f"{self._name}: ranks {refused} cannot go on; the error there says why")
        most = self._dealing.lengths[self._comm.rank]
        for rank, count in enumerate(counts):
            if not 0 <= count <= most:
                raise CommunicatorError(
                    f"{self._name}: rank {rank} tells of {count} entries where at most {most} can be; did all ranks "
                    "give the same numel?",
                    alone=True,
                )
        return counts

    def _scatter(self, counts: list[int]) -> Handle:
        """Send every entry to its rank; what a rank has for itself is not sent."""
        messages = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self._comm.size
        rest = self.rest.numpy()
        for other, (mine, (places, values)) in enumerate(zip(self._dealt, self._pieces, strict=True)):
            if other != self._comm.rank:
                dropped = np.empty_like(values)
                messages[other] = self._code.encode(places, values, dropped)
                rest[mine] = dropped
        return self._comm.alltoall(
            torch.cat(messages),
            splits=[len(message) for message in messages],
            received=self._sizes(counts),
            name=f"{self._name}: pieces",
        )

    def _sizes(self, counts: list[int]) -> list[int]:
        """Bytes of each rank's piece for this one, which sends itself none."""
        return [0 if other == self._comm.rank else self._code.size(count) for other, count in enumerate(counts)]

    def _keep(self, came: Tensor, counts: list[int]) -> Handle:
        """Add what came, and send what is kept of it to all."""
        rank, shares = self._comm.rank, self._dealing.shares
        sizes = [self._code.size(share) for share in shares]
        try:
            places, sums = self._largest(*add_pairs(self._lists(came, counts), self._dealing.groups))
            rest = np.zeros(shares[rank], np.float32)
            message = self._code.encode(places, sums, rest)
            self._own_places = places
            self.own_rest = torch.from_numpy(rest)
        except CommunicatorError as error:
            # Only this rank has seen it, and the others wait: what they get tells them that there is nothing.
            self._fault = error
            message = torch.zeros(sizes[rank], dtype=torch.uint8, device="cpu")
        return self._comm.allgather(message, sizes=sizes, name=f"{self._name}: largest sums")

    def _lists(self, came: Tensor, counts: list[int]) -> list[Pairs]:
        """The ranks' entries of this rank's hand."""
        lists = []
        for other, message in enumerate(torch.split(came, self._sizes(counts))):
            name = f"{self._name}: piece from rank {other}"
            own = other == self._comm.rank
            lists.append(self._pieces[other] if own else self._code.decode(message, counts[other], name=name))
        return lists

    def _largest(self, places: NDArray[np.int32], sums: NDArray[np.float32]) -> Pairs:
        """This rank's share of the sums, exactly as many as all ranks expect: zeros where there are too few."""
        rank, dealing = self._comm.rank, self._dealing
        share = dealing.shares[rank]
        kept = self._judge(torch.from_numpy(dealing.indices(places, rank)), torch.from_numpy(sums), share).numpy()
        missing = share - kept.size
        if not missing:
            return places[kept], sums[kept]
        kept = np.concatenate([kept, np.setdiff1d(np.arange(sums.size), kept)[:missing]])
        candidates = np.arange(min(dealing.lengths[rank], share + sums.size), dtype=np.int32)
        free = np.setdiff1d(candidates, places)[: share - kept.size]
        joined = np.concatenate([places[kept], free])
        order = np.argsort(joined)
        return joined[order], np.concatenate([sums[kept], np.zeros(free.size, np.float32)])[order]

    def _joined(self, came: Tensor) -> tuple[Tensor, Tensor]:
        """What all ranks have kept."""
        if self._fault is not None:
            raise self._fault
        shares, indices, sums = self._dealing.shares, [], []
        for rank, message in enumerate(torch.split(came, [self._code.size(share) for share in shares])):
            places, values = self._code.decode(message, shares[rank], name=f"{self._name}: sums of rank {rank}")
            indices.append(self._dealing.indices(places, rank))
            sums.append(values)
        joined = np.concatenate(indices)
        order = np.argsort(joined, kind="stable")
        kept = joined[order]
        if kept.size and not 0 <= kept[0] <= kept[-1] < self._dealing.numel:
            raise CommunicatorError(f"{self._name}: an index kept is not within 0 to {self._dealing.numel - 1}")
        return torch.from_numpy(kept), torch.from_numpy(np.concatenate(sums)[order])
