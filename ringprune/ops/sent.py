"""What was sent of a residual leaves it with the next pass over it, where that costs less than at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprune.ops.gather import gather
from ringprune.ops.take import take

__all__ = ["SENT", "SPARSE", "Sent", "may_wait", "take_lazily"]

SENT = "Tensor? sent=None, Tensor? rest=None, bool masks=False"
"""The same in the schemas of the ops that accumulate."""

SPARSE = 20
"""Of how many entries at least one may leave with a pass: they cost it more the closer they lie together."""


@dataclass(frozen=True)
class Sent:
    """What has been sent of a residual since it was written: a pass over it reads it as if that had left.

    Where it leaves at once (:func:`take`, :func:`give_back`), each entry waits for lines of memory of its own.
    The result is the same, to the bit.

    Attributes:
        indices: int32 [K], strictly ascending positions in [0, N).
        rest: float32 [K], what is left of the residual there: what rounding dropped; None is nothing.
        masks: of the velocity nothing is left there, but in tensors sent whole (momentum factor masking).
    """

    indices: Tensor
    rest: Tensor | None = None
    masks: bool = False

    def was_read(self) -> None:
        """Call it after what reads this: on a GPU its memory goes to nobody else before that is done.

        Where it was made on another stream, a block that is let go would be given to what that stream does next.
        """
        for tensor in (self.indices, self.rest):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    @staticmethod
    def arguments(sent: "Sent | None") -> dict[str, Any]:
        """As an op takes it; None is nothing."""
        if sent is None:
            return {"sent": None, "rest": None, "masks": False}
        return {"sent": sent.indices, "rest": sent.rest, "masks": sent.masks}


def may_wait(indices: Tensor, numel: int) -> bool:
    """Whether what is sent at ``indices`` of ``numel`` entries costs less where it leaves with the next pass."""
    return indices.numel() * SPARSE <= numel


def take_lazily(
    residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int]
) -> tuple[Tensor, Sent | None]:
    """Return the residual at ``indices``, and what is to leave it with the next pass.

    Where more than one in ``SPARSE`` entries is taken that costs more, and this is :func:`take`: it has left at once,
    and that is None. Else nothing is written.

    Args:
        residual: float32 [N], the tensors' residuals one after another.
        velocity: float32 [N] likewise, masked as by :func:`take`; None to keep it.
        indices: int32 [K], strictly ascending positions in [0, N); not to be changed before the next pass.
        offsets: T + 1 numbers, where each tensor starts; from 0 to N, not falling.

    Returns:
        Values, float32 [K]; and what was sent.
    """
    if not may_wait(indices, residual.numel()):
        return take(residual, velocity, indices, offsets), None
    return gather(residual, indices), Sent(indices, None, velocity is not None)
