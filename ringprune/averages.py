"""Averages between ``synchronize()`` and ``step()``: where entries are kept back, what clips them clips no gradient."""

import logging
from collections.abc import Collection, Sequence

from torch import Tensor

from ringprune.taken import Taken

__all__ = ["Averages"]

_log = logging.getLogger("ringprune")


class Averages:
    """Watches those of packed tensors, and tells once where a loop changes them.

    Args:
        params: whose averages.
        packed: numbers of those of which entries are kept back.
    """

    def __init__(self, params: Sequence[Tensor], packed: Collection[int]) -> None:
        self._packed, self._written = packed, Taken(params)
        self._told = False

    def written(self, *, watched: bool) -> None:
        """The averages of a step are there; ``watched``: entries are kept back, and the program's turn comes."""
        self._written.forget()
        for index in self._packed if watched and not self._told else ():
            self._written.take(index)

    def used(self, *, tell: bool) -> None:
        """The step is about to be made with them; ``tell``: this rank logs."""
        changed = self._written.changed()
        self._written.forget()
        if changed and tell and not self._told:
            _log.warning(
                "averages were changed between synchronize() and step(). Where tensors are pruned they hold what "
                "has waited for long, with its momentum: clipping takes most of it away for good. Let the policy clip "
                "each rank's own gradients, clip_norm=... or clip_norm_per_tensor=..., or wrap with overlap=False and "
                "clip between backward() and step() (docs/quickstart.md, Gradient clipping)"
            )
        self._told |= bool(changed)
