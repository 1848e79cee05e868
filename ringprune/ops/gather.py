"""Read the values to be sent and leave them where they are: stage 5 of the exchange, where they leave later."""

import torch
from torch import Tensor

from ringprune.ops.checks import check_flat, check_indices, check_positions
from ringprune.ops.library import call, define

__all__ = ["gather"]

SCHEMA = "gather(Tensor residual, Tensor indices) -> Tensor"


def gather(residual: Tensor, indices: Tensor) -> Tensor:
    """Return the residual at ``indices``, as ``residual.index_select(0, indices)`` does on one thread.

    Args:
        residual: float32 [N], the tensors' residuals one after another.
        indices: int32 [K], strictly ascending positions in [0, N); each is checked before it is followed. On CUDA a
            check would wait for the device: there the value at a position outside of [0, N) is 0.

    Returns:
        Values, float32 [K].

    Raises:
        ConfigurationError: a shape, device or an index does not fit.
        ArgumentTypeError: a dtype does not fit.
    """
    values: Tensor = call(_gather, residual, indices)
    return values


def check_gather(residual: Tensor, indices: Tensor) -> None:
    """Refuse arguments of :func:`gather` that do not fit."""
    check_flat("gather", "residual", residual, torch.float32)
    check_flat("gather", "indices", indices, torch.int32, device=residual.device)
    check_positions("gather", residual.numel())


def gather_reference(residual: Tensor, indices: Tensor) -> Tensor:
    """:func:`gather` in torch."""
    check_indices("gather", indices, residual.numel())
    return residual[indices]


def _gather_fake(residual: Tensor, indices: Tensor) -> Tensor:
    return torch.empty_like(indices, dtype=torch.float32)


_gather = define(SCHEMA, check_gather, gather_reference, _gather_fake)
