"""What is not sent moves by an estimate that all ranks share, learnt from what was sent."""

import torch
from torch import Tensor

__all__ = ["Smoothing"]


class Smoothing:
    """MIPD's exponential smoothing of dropped entries (doi 10.1109/tpds.2022.3154387), without counting twice.

    At each step all entries move by the estimate ``s`` of what a step brings on average, and the residual of every rank
    begins the step less ``s``. So what is sent of an entry is what the estimate has missed of it: ``x`` on average over
    the ranks, in the ``age`` steps since it was sent last, whose mean was ``s + x / age``. The estimate moves towards
    that, the further the more steps it is the mean of: ``s <- s + x / (age + (1 - a) / a)``, for an entry that is sent
    at each step ``s <- s + a x``. Sums, products and quotients alone, so that all ranks have the same bits.

    Args:
        share: ``a``, weight of a single step, above 0, at most 1.
        numel: entries of the bucket.
        device: where its tensors live.

    Attributes:
        estimate: ``s``, float32, shape ``(numel,)``, the same bytes on every rank.
        age: int32, shape ``(numel,)``: steps made since each entry was sent.
    """

    def __init__(self, share: float, numel: int, device: torch.device) -> None:
        self.estimate = torch.zeros(numel, dtype=torch.float32, device=device)
        self.age = torch.zeros(numel, dtype=torch.int32, device=device)
        self._prior = (1 - share) / share

    def apply(self, indices: Tensor | None, values: Tensor, scale: float) -> Tensor:
        """What the step moves every entry by; afterwards the estimate has learnt from it. The step is made.

        Args:
            indices: int32, ascending, where something was sent; None is everywhere.
            values: float32, ``scale`` times the average over the ranks, one per index.
            scale: 1 where averages are exchanged, the number of ranks where sums are.

        Returns:
            float32, shape ``(numel,)``, in the units of ``values``.
        """
        moved = self.estimate * scale
        self.age += 1
        where = slice(None) if indices is None else indices.long()
        ages = self.age[where].float()
        moved[where] += values
        self.estimate[where] += values / ((ages + self._prior) * scale)
        self.age[where] = 0
        return moved
