"""Whether an optimizer has stepped between two passes under DistributedDataParallel, whose hook never sees it."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Steps"]

SAMPLE = 8

_log = logging.getLogger("ringprune")


class Steps:
    """Warns, once, where a pass was exchanged and nobody stepped on it: what it sent has left the residuals."""

    def __init__(self) -> None:
        self._before: tuple[list[int], Tensor] | None = None
        self._told = False

    def exchanged(self, params: Sequence[Tensor]) -> None:
        """The gradients of ``params`` hold averages; nothing is remembered of none."""
        self._before = None if self._told or not params else _seen(params)

    def begin(self, params: Sequence[Tensor], *, tell: bool) -> None:
        """Another pass begins, of the same ``params``."""
        if self._before is None or torch._C._current_graph_task_id() == -1:  # join() plays a rank that is done
            return
        versions, sample = _seen(params)
        # Some optimizers write to .data, of which versions do not tell.
        if versions == self._before[0] and torch.equal(sample, self._before[1]):
            self._before, self._told = None, True
            if tell:
                _log.warning(
                    "two backward passes under DistributedDataParallel were exchanged, and no optimizer stepped in "
                    "between. zero_grad() after the first loses what it has sent, which was kept back until then: in a "
                    "GAN call discriminator.requires_grad_(False) around the generator's loss. To accumulate, "
                    "no_sync() sends less"
                )


def _seen(params: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    smallest = min(params, key=torch.Tensor.numel)
    return [param._version for param in params], smallest.detach().flatten()[:SAMPLE].clone()
