"""What a checkpoint holds besides torch's own keys, and the strict check when it is loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringprune.errors import CheckpointError

__all__ = ["FORMAT", "check_origin", "load_tensors", "save_tensors"]

FORMAT = 1

Tensors = Mapping[str, Mapping[str, Tensor]]


def save_tensors(state: Tensors) -> dict[str, dict[str, Tensor]]:
    """Copies of every tensor, by parameter name and kind."""
    return {name: {kind: tensor.detach().clone() for kind, tensor in entry.items()} for name, entry in state.items()}


def check_origin(saved: Any, rank: int, size: int) -> None:
    """Refuse a checkpoint that is not this rank's.

    Raises:
        CheckpointError: no RingPrune state, another format, or the residuals of another rank or number of ranks.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            "the checkpoint has no 'ringprune' entry, so it is not one of a ringprune.DistributedOptimizer; load it into "
            "the plain optimizer before wrapping it"
        )
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has RingPrune format {saved.get('format')!r}; this version reads {FORMAT}")
    if not saved["flushed"] and (saved["rank"], saved["size"]) != (rank, size):
        raise CheckpointError(
            f"the checkpoint holds the residuals of rank {saved['rank']} of {saved['size']}, this is rank {rank} of "
            f"{size}: load each rank's own file with the same number of ranks, or call flush() before saving, after "
            "which any rank's checkpoint serves any number of ranks"
        )


def load_tensors(state: Tensors, saved: Tensors) -> None:
    """Copy ``saved`` into ``state``; nothing is changed unless all of it fits.

    Raises:
        CheckpointError: names are missing, unexpected or have other shapes; lists the three.
    """
    want = {f"{name}.{kind}": tensor for name, entry in state.items() for kind, tensor in entry.items()}
    have = {f"{name}.{kind}": tensor for name, entry in saved.items() for kind, tensor in entry.items()}
    missing, unexpected = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    misshaped = [
        f"{key} ({list(have[key].shape)} in the checkpoint, {list(want[key].shape)} here)"
        for key in sorted(want.keys() & have.keys())
        if have[key].shape != want[key].shape
    ]
    if missing or unexpected or misshaped:
        raise CheckpointError(
            "the checkpoint does not fit this model and policy. "
            f"Missing: {_listed(missing)}. Unexpected: {_listed(unexpected)}. Other shape: {_listed(misshaped)}"
        )
    with torch.no_grad():
        for key, tensor in want.items():
            tensor.copy_(have[key])


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
