"""What a run sent, in the same words for plain Horovod and for RingPrune."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["horovod_stats", "mean_over_ranks", "stats_of"]

RATIOS = ("wire_ratio", "steady_wire_ratio", "value_ratio")


def stats_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, policy: str, ranks: int, steps: int
) -> dict[str, Any]:
    """``optimizer.stats()`` where there is one; for plain Horovod what follows from the size of the model."""
    if hasattr(optimizer, "stats"):
        stats: dict[str, Any] = optimizer.stats()
        return stats
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return horovod_stats(numbers, 2 if policy == "horovod-fp16" else 4, ranks, steps)


def horovod_stats(numbers: int, bytes_each: int, ranks: int, steps: int) -> dict[str, Any]:
    """The account of ring allreduces of everything: each rank sends 2 (P - 1) / P of the buffer at each step."""
    share = 2 * (ranks - 1) / ranks * numbers * steps
    ratio = 4 / bytes_each
    return {
        "steps": steps,
        "bytes_sent": share * bytes_each,
        "bytes_values": 0.0,
        "bytes_indices": 0.0,
        "bytes_dense": share * bytes_each,
        "bytes_headers": 0.0,
        "dense_equivalent_bytes": share * 4,
        "wire_ratio": ratio,
        "steady_wire_ratio": ratio,
        "value_ratio": ratio,
        "density": 1.0,
        "realised_density": 1.0,
        "seconds": {},
    }


def mean_over_ranks(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One account from that of each rank: counts and seconds are averaged, ratios so that they fit the mean bytes."""
    return {key: _mean(key, [one[key] for one in stats]) for key in stats[0]}


def _mean(key: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return mean_over_ranks(values)
    if values.count(values[0]) == len(values):
        return values[0]
    if key in RATIOS:
        return len(values) / sum(1 / value for value in values)
    return sum(values) / len(values)
