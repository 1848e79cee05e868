"""Score the entries of the residual by how much they would change their weights: stage 2 of the exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS, check_flat, check_numbers, check_tensors, offsets_of
from ringprune.ops.library import call, define

__all__ = ["importance"]

SCHEMA = "importance(Tensor residual, Tensor[] weights, *, float[] floors) -> Tensor"


def importance(residual: Tensor, weights: Sequence[Tensor], *, floors: Sequence[float]) -> Tensor:
    """Importance of every residual entry relative to its weight.

    Entry by entry of tensor i, each operation rounded to float32::

        score = |residual| / (|float32(weight)| + float32(floors[i]))

    With ``floors[i] = 0`` this is the ratio of Importance Weighted Pruning (arXiv 1901.01544). RingPrune damps it:
    ``floors[i] = damping * rms(weight of tensor i) + eps`` keeps weights near zero from winning by that alone.
    0 / 0 is NaN, which :func:`ringprune.ops.select` ranks highest.

    Args:
        residual: float32 [N].
        weights: T contiguous tensors of any shape, float32, float16 or bfloat16; N entries together.
        floors: T finite numbers >= 0, in units of the weights.

    Returns:
        Scores, float32 [N].

    Raises:
        ConfigurationError: a shape, device, length or number does not fit.
        ArgumentTypeError: a dtype does not fit.
    """
    check_flat("importance", "residual", residual, torch.float32)
    check_tensors("importance", "weights", weights, FLOATS, device=residual.device, numel=residual.numel())
    check_numbers("importance", "floors", floors, len(weights), low=0.0)
    scores: Tensor = call(_importance, residual, weights, floors=floors)
    return scores


def importance_reference(residual: Tensor, weights: Sequence[Tensor], *, floors: Sequence[float]) -> Tensor:
    """:func:`importance` in torch."""
    floors32 = torch.tensor(floors, dtype=torch.float32)
    scores = residual.abs()
    offsets = offsets_of(weights)
    for i, weight in enumerate(weights):
        scores[offsets[i] : offsets[i + 1]] /= weight.detach().reshape(-1).float().abs() + floors32[i]
    return scores


def _importance_fake(residual: Tensor, weights: Sequence[Tensor], *, floors: Sequence[float]) -> Tensor:
    return torch.empty_like(residual)


_importance = define(SCHEMA, importance_reference, _importance_fake)
