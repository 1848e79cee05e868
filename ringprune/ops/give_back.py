"""Write what rounding dropped back into the residual at the indices it was taken from: after stage 6."""

import torch
from torch import Tensor

from ringprune.ops.checks import check_flat, check_indices, check_positions
from ringprune.ops.library import call, define

__all__ = ["give_back"]

SCHEMA = "give_back(Tensor(a!) residual, Tensor indices, Tensor values) -> ()"


def give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Make ``residual`` at ``indices`` what ``values`` are; elsewhere it stays.

    Args:
        residual: float32 [N], changed; it shares no memory with the others.
        indices: int32 [K], strictly ascending positions in [0, N); checked before anything is written. On CUDA a check
            would wait for the device: there positions outside of [0, N) are passed over (nothing is written for them).
        values: float32 [K].

    Raises:
        ConfigurationError: a shape, device or an index does not fit; nothing has been written.
        ArgumentTypeError: a dtype does not fit; nothing has been written.
    """
    call(_give_back, residual, indices, values)


def check_give_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Refuse arguments of :func:`give_back` that do not fit."""
    check_flat("give_back", "residual", residual, torch.float32)
    check_flat("give_back", "indices", indices, torch.int32, device=residual.device)
    check_flat("give_back", "values", values, torch.float32, device=residual.device, numel=indices.numel())
    check_positions("give_back", residual.numel())


def give_back_reference(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """:func:`give_back` in torch."""
    check_indices("give_back", indices, residual.numel())
    residual[indices] = values


def _give_back_fake(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """Nothing is returned, so there is no shape to tell."""


_give_back = define(SCHEMA, check_give_back, give_back_reference, _give_back_fake)
