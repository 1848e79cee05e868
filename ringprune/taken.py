"""Gradients that an exchange has taken during a backward pass: which it may overwrite, which were changed since."""

from collections.abc import Sequence

from torch import Tensor

from ringprune.memory import held_alone, is_shared

__all__ = ["CHANGED", "Taken"]

CHANGED = (
    "the gradient of {!r} was changed between backward() and step(), or by a hook that was registered after the "
    "optimizer was wrapped, while it was exchanged. To clip each rank's own, wrap with overlap=False, or let the "
    "policy clip where it can (clip_norm of IWP, clip_norm_per_tensor of IWP, DGC and OkTopk). Averages of what is "
    "sent whole may be changed between synchronize() and step()"
)
"""What a gradient that was changed means to who changed it."""


class Taken:
    """What has been taken of one step.

    Args:
        params: whose gradients.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._alone: dict[int, bool] = {}

    def take(self, index: int) -> bool:
        """A gradient is taken, or another part of it; whether nobody else reads its memory."""
        grad = self._params[index].grad
        if index not in self._alone:  # later, the parts of it that were handed over count too
            if grad is None or grad.is_sparse:  # it is made anew
                self._alone[index] = True
            else:
                self._alone[index] = held_alone(grad)
                self._versions[index] = grad, grad._version
        return self._alone[index]

    def changed(self) -> list[int]:
        """Those that were changed or replaced since they were taken, as far as torch tells; dropped ones were not."""
        return [i for i, (grad, version) in self._versions.items() if self._is_changed(i, grad, version)]

    def _is_changed(self, index: int, taken: Tensor, version: int) -> bool:
        grad = self._params[index].grad
        if grad is None or (grad is taken and grad._version == version):
            return False
        # A change of whatever lies in the same memory counts as one, that of a gradient that came later too.
        others = [param.grad for param in self._params if param.grad is not None]
        return grad is not taken or not is_shared(grad, others)

    def forget(self) -> None:
        """The step is over."""
        self._versions.clear()
        self._alone.clear()
