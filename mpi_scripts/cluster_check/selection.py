"""Measures what one selection pass costs on a host, to be held against what the network costs."""

import statistics
import time

import torch
from torch import Tensor

from ringprune import ops

__all__ = ["selection_seconds"]

STEPS = 7


def selection_seconds(entries: int, density: float) -> float:
    """Median seconds of accumulating, scoring and selecting over ``entries`` float32 entries, in one fused pass.

    Args:
        entries: of the tensor.
        density: share that is selected.
    """
    generator = torch.Generator().manual_seed(0)
    grad, weight, residual, velocity = (torch.randn(entries, generator=generator) for _ in range(4))
    hints = ops.Hints.none(1, torch.device("cpu"))
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        found = _select(grad, weight, residual, velocity, hints, max(1, round(density * entries)))
        times.append(time.perf_counter() - begin)
        ops.take(residual, velocity, found[found >= 0], [0, entries])
    return statistics.median(times)


def _select(grad: Tensor, weight: Tensor, residual: Tensor, velocity: Tensor, hints: ops.Hints, count: int) -> Tensor:
    positions, _ = ops.accumulate_select(
        [grad],
        residual,
        velocity,
        [weight],
        residual_out=residual,
        velocity_out=velocity,
        factors=[1.0],
        momentum=[0.9],
        nesterov=[False],
        score="ratio",
        parameters=[0.05],
        counts=[count],
        hints=hints,
    )
    return positions
