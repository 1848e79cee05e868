"""Take the values to be sent out of the residual and clear them there: stage 5 of the exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops.checks import check_flat, check_indices, check_offsets, check_positions
from ringprune.ops.library import call, define

__all__ = ["take"]

SCHEMA = "take(Tensor(a!) residual, Tensor(b!)? velocity, Tensor indices, int[] offsets) -> Tensor"


def take(residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the residual at ``indices``, and clear residual and velocity there.

    A tensor that ``indices`` cover completely is sent whole and keeps its velocity, as in plain momentum; elsewhere
    the velocity is masked, as in Deep Gradient Compression.

    Args:
        residual: float32 [N], the tensors' residuals one after another; zero at ``indices`` afterwards.
        velocity: float32 [N] likewise, or None; zero at ``indices`` afterwards, but in tensors sent whole.
        indices: int32 [K], strictly ascending positions in [0, N); checked before anything is written. On CUDA a check
            would wait for the device: there positions outside of [0, N) are passed over (their value is 0).
        offsets: T + 1 numbers, where each tensor starts; from 0 to N, not falling. They tell which tensor is whole.

    Returns:
        Values, float32 [K].

    Raises:
        ConfigurationError: a shape, device, the offsets or an index do not fit; nothing has been written.
        ArgumentTypeError: a dtype does not fit; nothing has been written.
    """
    values: Tensor = call(_take, residual, velocity, indices, offsets)
    return values


def check_take(residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int]) -> None:
    """Refuse arguments of :func:`take` that do not fit."""
    check_flat("take", "residual", residual, torch.float32)
    device, numel = residual.device, residual.numel()
    if velocity is not None:
        check_flat("take", "velocity", velocity, torch.float32, device=device, numel=numel)
    check_flat("take", "indices", indices, torch.int32, device=device)
    check_positions("take", numel)
    check_offsets("take", offsets, numel)


def take_reference(residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int]) -> Tensor:
    """:func:`take` in torch."""
    check_indices("take", indices, residual.numel())
    values = residual[indices]
    residual[indices] = 0.0
    if velocity is not None:
        starts = torch.tensor(offsets, device=indices.device)
        taken = torch.searchsorted(indices, starts).diff()  # how many indices fall into each tensor
        whole = torch.repeat_interleave(taken == starts.diff(), taken)
        velocity[indices[~whole]] = 0.0
    return values


def _take_fake(residual: Tensor, velocity: Tensor | None, indices: Tensor, offsets: Sequence[int]) -> Tensor:
    return torch.empty_like(indices, dtype=torch.float32)


_take = define(SCHEMA, check_take, take_reference, _take_fake)
