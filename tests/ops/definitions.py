"""What the ops are held against: their docstrings in NumPy and plain Python, as slow and as clear as can be."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringprune import ops
from tests.ops.cases import positions

__all__ = ["SCORES", "accumulated", "scored", "selected"]


def accumulated(
    grads: list[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    factors: list[float],
    momentum: list[float],
    nesterov: list[bool],
) -> tuple[Tensor, Tensor | None]:
    """The formula of the docstring in NumPy; returns (residual, velocity) as new tensors."""
    residual = residual.numpy().copy()
    velocity = None if velocity is None else velocity.numpy().copy()
    start = 0
    with np.errstate(all="ignore"):
        for grad, factor, mass, looks_ahead in zip(grads, factors, momentum, nesterov, strict=True):
            part = slice(start, start := start + grad.numel())
            g = grad.float().reshape(-1).numpy() * np.float32(factor)
            if velocity is not None:
                v = np.float32(mass) * velocity[part] + g
                velocity[part] = v
                g = g + np.float32(mass) * v if looks_ahead else v
            residual[part] = residual[part] + g
    return torch.from_numpy(residual), None if velocity is None else torch.from_numpy(velocity)


SCORES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "ratio": lambda v, w, p: np.abs(v) / (np.abs(w) + p),
    "magnitude": lambda v, w, p: np.abs(v),
    "sum": lambda v, w, p: np.abs(w) + np.abs(v) * p,
    "product": lambda v, w, p: np.abs(w) * np.abs(v),
}


def scored(residual: Tensor, weights: list[Tensor], score: str, parameters: list[float]) -> Tensor:
    """The formulas of the docstring in NumPy."""
    scores = np.empty(residual.numel(), np.float32)
    start = 0
    with np.errstate(all="ignore"):
        for weight, parameter in zip(weights, parameters, strict=True):
            part = slice(start, start := start + weight.numel())
            w = weight.float().reshape(-1).numpy()
            scores[part] = SCORES[score](residual[part].numpy(), w, np.float32(parameter))
    return torch.from_numpy(scores)


def selected(scores: Tensor, offsets: list[int], counts: list[int]) -> Tensor:
    """Sort by rank, then by position; NaN ranks first, zero and less are left out and their places padded."""
    values = scores.tolist()

    def rank(i: int) -> tuple[bool, float, int]:
        nan = math.isnan(values[i])
        return (not nan, 0.0 if nan else -values[i], i)

    found: list[int] = []
    for (start, end), count in zip(pairwise(offsets), counts, strict=True):
        able = [i for i in range(start, end) if not values[i] <= 0]
        chosen = sorted(sorted(able, key=rank)[:count])
        found += chosen + [ops.PAD] * (count - len(chosen))
    return positions(*found)
