"""The gradients of one rank, before a step of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune import ops
from ringprune.arguments import DENSE_ONLY
from ringprune.memory import overlapping
from ringprune.residual import Clipping

__all__ = ["LocalGradients"]


class LocalGradients:
    """What is in ``param.grad`` before a local step.

    Args:
        optimizer: what steps on it.
        params: those that are exchanged; the optimizer may have others.
        clipping: the policy's; its bounds are one rank's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], clipping: Clipping) -> None:
        self._optimizer, self._params, self._clipping = optimizer, params, clipping

    def count_nonfinite(self) -> tuple[list[int], Tensor]:
        """Which parameters have a gradient, and how many entries of each are NaN or infinite, int64."""
        held = self._held()
        entries = [_entries(grad) for _, grad in held]
        return [i for i, _ in held], ops.count_nonfinite(entries) if held else torch.empty(0, dtype=torch.int64)

    def make_dense(self) -> None:
        """Sparse ones, for an optimizer that takes none: as gradient mode does for any."""
        always = type(self._optimizer).__name__ in DENSE_ONLY
        for group in self._optimizer.param_groups:
            for param in group["params"] if always or group.get("weight_decay") else ():
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()

    def correct(self, loss_scale: float) -> None:
        """Bring them to unscaled units and clip them."""
        held = self._held()
        factors = self._clipping.factors([_entries(grad) for _, grad in held], 1 / loss_scale, ranks=1)
        grads = [grad for _, grad in held]
        if any(factor != 1.0 for factor in factors):
            for place in overlapping(grads):  # what is multiplied for one of them is not for the other
                self._params[held[place][0]].grad = grads[place] = grads[place].clone()
        for grad, factor in zip(grads, factors, strict=True):
            if factor != 1.0:
                grad.mul_(factor)

    def _held(self) -> list[tuple[int, Tensor]]:
        return [(i, param.grad) for i, param in enumerate(self._params) if param.grad is not None]


def _entries(grad: Tensor) -> Tensor:
    return (grad.coalesce().values() if grad.is_sparse else grad.detach()).contiguous()
