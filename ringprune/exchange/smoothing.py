"""What is not sent moves by an estimate that all ranks share, learnt from what was sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import ops, packing, pages

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
    """

    def __init__(self, share: float, numel: int, device: torch.device) -> None:
        self.estimate = pages.zeros(numel, device)
        # Less the steps made since it was asked for: counting on touches no memory.
        self._age, self._made = pages.zeros(numel, device).view(torch.int32), 0
        self._prior = (1 - share) / share

    @property
    def age(self) -> Tensor:
        """int32, shape ``(numel,)``: steps made since each entry was sent; may be changed before the next step."""
        if self._made:
            self._age += self._made
            self._made = 0
        return self._age

    def apply(self, outputs: Sequence[Tensor], indices: Tensor | None, values: Tensor, scale: float) -> None:
        """Write what the step moves every entry by; the estimate learns from it. The step is made.

        Args:
            outputs: the bucket's tensors; overwritten, in the units of ``values``.
            indices: int32, ascending, where something was sent; None is everywhere.
            values: float32, ``scale`` times the average over the ranks, one per index.
            scale: 1 where averages are exchanged, the number of ranks where sums are.
        """
        self._made += 1
        estimate, bits = self.estimate, self._age.view(torch.float32)  # the ops move them as they are
        before, ages = _read(estimate, indices), (_read(bits, indices).view(torch.int32) + self._made).float()
        _write(bits, indices, torch.full_like(values, -self._made, dtype=torch.int32).view(torch.float32))
        learnt = before + values / ((ages + self._prior) * scale)
        # What was sent is in the estimate while that is copied: no tensor of its size is needed.
        moved = estimate if scale == 1.0 else estimate * scale
        _write(moved, indices, before * scale + values)
        packing.unflatten(outputs, moved)
        _write(estimate, indices, learnt)


def _read(flat: Tensor, indices: Tensor | None) -> Tensor:
    return flat.clone() if indices is None else ops.gather(flat, indices)


def _write(flat: Tensor, indices: Tensor | None, values: Tensor) -> None:
    if indices is None:
        flat.copy_(values)
    else:
        ops.give_back(flat, indices, values)
