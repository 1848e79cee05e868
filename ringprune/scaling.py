"""Loss scaling: residuals stay in unscaled units, and an overflow on one rank lowers the scale on all of them.

``GradScaler.step`` hands the scale to optimizers that set ``_step_supports_amp_scaling`` and leaves the decision to
them. With a scaler the wrapper divides by the scale as gradients enter the residual.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune import ops
from ringprune.errors import ArgumentTypeError, NonFiniteGradientError

__all__ = ["LossScale", "check_halves"]

LEAST = 1 / torch.finfo(torch.float32).max
"""A loss scale below this has no inverse in float32, by which gradients are multiplied."""


def check_halves(averages: Iterable[tuple[str, Tensor]]) -> None:
    """Averages are float32, and the same on all ranks; what float16 cannot hold of them all ranks refuse.

    Args:
        averages: of parameters by name, dense and contiguous; those of float16 are looked at.

    Raises:
        NonFiniteGradientError: an entry is infinite.
    """
    halves = [(name, average) for name, average in averages if average.dtype == torch.float16]
    counts = ops.count_nonfinite([average for _, average in halves]).tolist() if halves else []
    for (name, average), count in zip(halves, counts, strict=True):
        if count:
            raise NonFiniteGradientError(
                f"the average of {name!r} is beyond float16 in {count} of {average.numel()} entries, though every "
                "rank's gradient was finite: what was kept back has added up. The step was not made, and what was sent "
                "is gone; keep the parameters in float32, under torch.autocast, or send more of them"
            )


class LossScale:
    """The loss scale of one step.

    Args:
        scaler: the training loop's ``torch.amp.GradScaler``; None where there is none.
        device: where parameters live: the scaler gets its scale there now. Else that comes with its first loss, and
            ``GradScaler.step`` raises on a rank that has had none. None leaves it to that.
    """

    def __init__(self, scaler: Any, device: torch.device | None = None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentTypeError(f"scaler={scaler!r}: a torch.amp.GradScaler, or None")
        self._scaler: torch.amp.GradScaler | None = scaler
        self.value = 1.0
        if scaler is not None and device is not None:
            scaler.scale(torch.zeros((), device=device))

    def __str__(self) -> str:
        return f"loss scaling {'on' if self.enabled else 'off'}"

    @property
    def enabled(self) -> bool:
        """Whether gradients are scaled."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def read(self) -> None:
        """A step begins: read the scale its loss is multiplied by, the same on all ranks.

        Raises:
            NonFiniteGradientError: nothing can be divided by it.
        """
        if self._scaler is not None and self.enabled:
            self.value = float(self._scaler.get_scale())
            if self.value < LEAST:
                raise NonFiniteGradientError(
                    f"the GradScaler's scale has fallen to {self.value:g}: gradients overflow at any, training has "
                    "diverged. Go back to a checkpoint, with a lower learning rate"
                )

    @torch.no_grad()
    def multiply(self, params: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of ``params`` by ``factor``."""
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def overflow(self, params: Iterable[Tensor]) -> None:
        """A rank's gradients overflowed: let whoever looks at this rank's see it too.

        Args:
            params: the wrapper's parameters with dense gradients, which become infinite.
        """
        if self.enabled:
            for param in params:
                param.grad = torch.full_like(param, float("inf"))

    @contextmanager
    def inside(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around the wrapper's step, which ``GradScaler.step`` may have called.

        ``GradScaler.update`` insists on a record of what was found in the gradients, and a rank without a batch, or
        without a row, has none that could be looked at. What the scaler leaves in the optimizer it removes only after a
        step that went well.
        """
        if hasattr(optimizer, "grad_scale") and self.enabled and not self._found(optimizer):
            device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
            self._found(optimizer)[device] = torch.zeros((), dtype=torch.float32, device=device)
        try:
            yield
        except Exception:
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
            raise

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Inside ``GradScaler.step``, :meth:`inside`: some rank's gradients overflowed."""
        for flag in self._found(optimizer).values():
            flag.fill_(1.0)

    def _found(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """What the scaler has found in an optimizer's gradients, by device."""
        if self._scaler is None or not self.enabled:
            return {}
        found: dict[torch.device, Tensor] = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found
