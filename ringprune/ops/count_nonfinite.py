"""Count the NaN and infinite entries of each tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS_AND_DOUBLE, check_tensors
from ringprune.ops.library import call, define

__all__ = ["count_nonfinite"]

SCHEMA = "count_nonfinite(Tensor[] tensors) -> Tensor"


def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Number of NaN and infinite entries of every tensor, so that they are seen before they enter the residual.

    Args:
        tensors: T contiguous tensors of any shape, float32, float16, bfloat16 or float64.

    Returns:
        Counts, int64 [T]. On the device of the tensors, or on the CPU where there are none.

    Raises:
        ConfigurationError: a tensor is not contiguous or on another device than the first.
        ArgumentTypeError: a dtype does not fit.
    """
    if isinstance(tensors, (list, tuple)) and not tensors:  # the dispatcher needs a tensor to find the kernel
        return torch.empty(0, dtype=torch.int64, device="cpu")
    counts: Tensor = call(_count_nonfinite, tensors)
    return counts


def check_count_nonfinite(tensors: Sequence[Tensor]) -> None:
    """Refuse arguments of :func:`count_nonfinite` that do not fit."""
    check_tensors("count_nonfinite", "tensors", tensors, FLOATS_AND_DOUBLE)


def count_nonfinite_reference(tensors: Sequence[Tensor]) -> Tensor:
    """:func:`count_nonfinite` in torch."""
    return torch.stack([tensor.isfinite().logical_not().sum() for tensor in tensors])


def _count_nonfinite_fake(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)


_count_nonfinite = define(SCHEMA, check_count_nonfinite, count_nonfinite_reference, _count_nonfinite_fake)
