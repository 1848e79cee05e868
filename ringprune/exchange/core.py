"""The part of a bucket's index set that is agreed once in several steps, and kept in between without a message."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import agreement
from ringprune.plan import Bucket
from ringprune.policies.policy import Policy

__all__ = ["Core"]


class Core:
    """Slim-DP's exploit set (arXiv 1709.09393): what roots propose at a refresh serves until the next.

    The same on every rank, and a function of the steps made: a step that is not made leaves no trace, as the next one
    has its number and chooses again where it did.

    Args:
        policy: its ``refresh`` is the steps from one to the next. A step of another density than before is one too.
        first: the first step, which is one.
        bucket: the tensors.

    Attributes:
        mask: uint8, shape ``(numel,)``, 1 at the core; what a checkpoint keeps.
    """

    def __init__(self, policy: Policy, first: int, bucket: Bucket) -> None:
        self.mask = torch.zeros(bucket.numel, dtype=torch.uint8, device=bucket.device)
        self._refresh, self._density, self._first = policy.refresh, policy.density, first
        self._indices: Tensor | None = None
        self._chosen: Tensor | None = None

    def due(self, step: int) -> bool:
        """Whether roots propose at ``step``."""
        begins = step % self._refresh == 0 or step == self._first
        return begins or self._density.at(step) != self._density.at(step - 1)

    def of(self, step: int, proposals: Sequence[Tensor]) -> Tensor:
        """The core at ``step``, int32, ascending; the union of ``proposals`` where it is due."""
        if self.due(step):
            self._chosen = agreement.union(proposals, self.mask.device)
            return self._chosen
        if self._indices is None:
            self._indices = self.mask.nonzero().flatten().int()
        return self._indices

    def commit(self) -> None:
        """The step was made: what was chosen at it stays."""
        if self._chosen is not None:
            self._indices, self._chosen = self._chosen, None
            self.mask.zero_().index_fill_(0, self._indices.long(), 1)

    def reread(self) -> None:
        """The mask was overwritten."""
        self._indices = self._chosen = None
