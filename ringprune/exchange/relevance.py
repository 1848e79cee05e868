"""How a bucket's budget is divided over its tensors: evenly, or by relevance that all ranks agree on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import importance, ops, selection
from ringprune.comm.communicator import Communicator, Handle

__all__ = ["REFRESH", "Relevance"]

REFRESH = importance.RMS_REFRESH
"""Steps between two readings."""

UNITS = 2.0**40
"""Of which each rank distributes so many: whole numbers, so that their sum is the same bits in any order of ranks."""


class Relevance:
    """First-order relevance of tensors (MIPD, doi 10.1109/tpds.2022.3154387): each one's share of ``|w * residual|``.

    It is read at the first step and every ``REFRESH`` steps, from what is accumulated then, and holds from the next
    step on; before that budgets are even.

    Args:
        numels: entries of the bucket's tensors.

    Attributes:
        shares: int64, one per tensor: the sum of all ranks' shares; zeros before the first reading.
    """

    def __init__(self, numels: list[int]) -> None:
        self.shares = torch.zeros(len(numels), dtype=torch.int64, device="cpu")
        self._numels = numels
        self._handle: Handle | None = None

    def budgets(self, density: float) -> list[int]:
        """Entries to send of each tensor; as many together as with even budgets."""
        even = selection.budgets(self._numels, density)
        shares: list[int] = self.shares.tolist()
        return selection.divide(sum(even), shares, self._numels) if any(shares) else even

    def read(self, residual: Tensor, weights: Sequence[Tensor], comm: Communicator, *, name: str) -> None:
        """Begin to agree on the relevance of what is accumulated; 8 bytes per tensor.

        Args:
            residual: float32, shape ``(n,)``, of all tensors.
            weights: the tensors' weights, contiguous.
            comm: with whom.
            name: what errors call the message.
        """
        parts = ops.importance(residual, weights, score="product", parameters=[0.0] * len(weights))
        sums = torch.stack([part.sum(dtype=torch.float64) for part in torch.split(parts, self._numels)])
        # Nothing relevant, or something not finite: this rank has no say.
        own = (sums / sums.sum() * UNITS).nan_to_num(0.0, 0.0, 0.0).long()
        self._handle = comm.allreduce(own, name=name)

    def drain(self) -> None:
        """The step is not made: wait for what is under way and forget it."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def forget(self) -> None:
        """Forget what is under way."""
        self._handle = None

    def commit(self) -> None:
        """The step was made: what was read at it holds from now on."""
        if self._handle is not None:
            self.shares = self._handle.wait().cpu()
            self._handle = None
