"""Stage 4: from the roots' proposals to one index set that is the same on every rank.

The roots of a bucket at a step are a function of (seed, step, bucket): every rank computes them, no message is needed.
In the IWP paper's words a root is a leader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ringprune import counter_rng
from ringprune.bitmap import read_bitmap, set_bits
from ringprune.comm.communicator import Communicator, Handle
from ringprune.errors import ConfigurationError
from ringprune.validation import one_of, whole_number

__all__ = ["Proposals", "Roots", "union"]

SPARSE = 500
"""Entries per index proposed from which on sorting is faster than to look for the bits that are set."""


@dataclass(frozen=True)
class Roots:
    """Who proposes indices.

    Args:
        count: number of roots of a bucket and step, or ``"all"``: every rank proposes its share.
        order: ``"random"``, drawn for each bucket and step; ``"cyclic"``, the ranks take turns, ``count`` of them at a
            step, the same for all buckets (ScaleCom, arXiv 2104.11125).
    """

    count: int | Literal["all"] = 1
    order: Literal["random", "cyclic"] = "random"

    def __post_init__(self) -> None:
        one_of("order", self.order, ("random", "cyclic"))
        if isinstance(self.count, str) and self.count != "all":
            raise ConfigurationError(f'roots={self.count!r}: a whole number of at least 1, or "all"')
        if self.count != "all":
            whole_number("roots", self.count, 1)

    def number(self, size: int) -> int:
        """How many roots there are among ``size`` ranks.

        Raises:
            ConfigurationError: there are fewer ranks than roots.
        """
        if self.count == "all":
            return size
        if self.count > size:
            raise ConfigurationError(f'roots={self.count} with {size} ranks: at most {size}, or "all"')
        return self.count

    def of(self, seed: int, step: int, bucket: int, size: int) -> tuple[int, ...]:
        """The roots of ``bucket`` at ``step``, in the order in which they broadcast."""
        if self.count == "all":
            return tuple(range(size))
        if self.order == "cyclic":
            return tuple((step * self.count + turn) % size for turn in range(self.count))
        return counter_rng.distinct(self.count, size, seed, step, bucket)


class Proposals:
    """The roots' messages of one bucket under way.

    Args:
        comm: the communicator.
        roots: the ranks that propose.
        message: this rank's encoded proposal, or a buffer of the same size and dtype where it is no root.
        name: what errors call it.
    """

    def __init__(self, comm: Communicator, roots: Sequence[int], message: Tensor, *, name: str) -> None:
        self._roots, self._gathered = roots, len(roots) == comm.size
        self._handles: list[Handle] = []
        if self._gathered:
            self._handles.append(comm.allgather(message, name=name))
            return
        for turn, root in enumerate(roots):
            buffer = message if root == comm.rank else torch.empty_like(message)
            self._handles.append(comm.broadcast(buffer, root, name=f"{name}, root {turn}"))

    def done(self) -> bool:
        """Whether all messages are there."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> list[tuple[int, Tensor]]:
        """Each root's rank and message; the same bytes on every rank."""
        messages = [handle.wait() for handle in self._handles]
        if self._gathered:
            return list(enumerate(messages[0].tensor_split(len(self._roots))))
        return list(zip(self._roots, messages, strict=True))


def union(proposals: Sequence[Tensor], device: torch.device) -> Tensor:
    """One index set of all proposals, ascending, each index once; int32, on ``device``.

    Args:
        proposals: int32, each ascending, of indices from 0 on.
        device: where they are.
    """
    if not proposals:
        return torch.empty(0, dtype=torch.int32, device=device)
    if len(proposals) == 1:
        return proposals[0]
    found = [proposal for proposal in proposals if proposal.numel()]
    numel = max((int(proposal[-1]) + 1 for proposal in found), default=0) if device.type == "cpu" else 0
    if not numel or sum(proposal.numel() for proposal in found) * SPARSE < numel:
        merged: Tensor = torch.unique(torch.cat(list(proposals)), sorted=True)
        return merged
    # They are in order already: a bit for each possible index is read and written faster than they are sorted again.
    words = np.zeros(-(-numel // 64), np.uint64)
    count = sum(set_bits(proposal.numpy(), words) for proposal in found)
    indices = np.empty(count, np.int32)
    read_bitmap(words, numel, indices)
    return torch.from_numpy(indices)
