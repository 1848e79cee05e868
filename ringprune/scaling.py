"""Loss scaling: residuals stay in unscaled units, and an overflow on one rank lowers the scale on all of them.

``GradScaler.step`` hands the scale to optimizers that set ``_step_supports_amp_scaling`` and leaves the decision to
them. With a scaler the wrapper divides by the scale as gradients enter the residual.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ringprune.errors import ArgumentTypeError

__all__ = ["LossScale"]


class LossScale:
    """The loss scale of one step.

    Args:
        scaler: the training loop's ``torch.amp.GradScaler``; None where there is none.
    """

    def __init__(self, scaler: Any) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentTypeError(f"scaler={scaler!r}: a torch.amp.GradScaler, or None")
        self._scaler: torch.amp.GradScaler | None = scaler
        self.value = 1.0

    def __str__(self) -> str:
        return f"loss scaling {'on' if self.enabled else 'off'}"

    @property
    def enabled(self) -> bool:
        """Whether gradients are scaled."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def read(self) -> None:
        """A step begins: read the scale its loss is multiplied by."""
        if self._scaler is not None and self.enabled:
            self.value = float(self._scaler.get_scale())

    @torch.no_grad()
    def multiply(self, params: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of ``params`` by ``factor``."""
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def overflow(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], *, stepping: bool) -> None:
        """A rank's gradients overflowed: let this rank's scaler see it too.

        Args:
            optimizer: the wrapper.
            params: its parameters; their gradients become infinite, which is what the scaler looks for.
            stepping: called from inside ``GradScaler.step``, which has looked already and must look again.
        """
        if not self.enabled:
            return
        for param in params:
            param.grad = torch.full_like(param, float("inf"))
        if stepping and self._scaler is not None:
            self._scaler._check_inf_per_device(optimizer)
