"""What optimizers do under DistributedDataParallel, whose hook never sees one: which steps, and whether any has."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["FirstStep", "Steps"]

SAMPLE = 8

_OVER: list[RemovableHandle] = []
"""Of hooks whose work is done."""

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


class FirstStep:
    """Looks, once, at the first optimizer that steps on some parameters, as long as this is kept.

    Args:
        params: the parameters.
        look: what is called with the optimizer.
    """

    def __init__(self, params: Sequence[Tensor], look: Callable[[torch.optim.Optimizer], None]) -> None:
        self._made = False
        kept, ids = weakref.ref(self), {id(param) for param in params}

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            this = kept()
            if this is None or this._made:
                return
            if not ids.isdisjoint(id(param) for group in optimizer.param_groups for param in group["params"]):
                this._made = True
                look(optimizer)

        _take_back()
        # One for all optimizers there are. Not taken back where torch may go through those there are: inside of it, nor
        # when this is collected, which may be inside of another.
        hook = register_optimizer_step_pre_hook(torch.compiler.disable(before))
        self._over = weakref.finalize(self, _OVER.append, hook)

    def settle(self) -> None:
        """Between steps: where it has looked, optimizers are left alone from now on."""
        if self._made:
            self._over()
            _take_back()


def _take_back() -> None:
    """Between steps: remove what looks no more."""
    while _OVER:
        _OVER.pop().remove()


def _seen(params: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    smallest = min(params, key=torch.Tensor.numel)
    return [param._version for param in params], smallest.detach().flatten()[:SAMPLE].clone()
