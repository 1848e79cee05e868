"""Sum the squares of each tensor in double precision, in one fixed order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS_AND_DOUBLE, check_tensors
from ringprune.ops.library import call, define

__all__ = ["square_sum"]

SCHEMA = "square_sum(Tensor[] tensors) -> Tensor"


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of every tensor, the same bits on every rank, device and number of threads.

    Neighbours are added in pairs, the sums again, until one is left; a last entry without neighbour is added to zero.
    Norms for clipping and the rms of the weights come from here, and the ranks act on them without a message.

    Args:
        tensors: T contiguous tensors of any shape, float32, float16, bfloat16 or float64.

    Returns:
        Sums, float64 [T]; 0 for an empty tensor. On the device of the tensors, or on the CPU where there are none.

    Raises:
        ConfigurationError: a tensor is not contiguous or on another device than the first.
        ArgumentTypeError: a dtype does not fit.
    """
    if isinstance(tensors, (list, tuple)) and not tensors:  # the dispatcher needs a tensor to find the kernel
        return torch.empty(0, dtype=torch.float64, device="cpu")
    sums: Tensor = call(_square_sum, tensors)
    return sums


def check_square_sum(tensors: Sequence[Tensor]) -> None:
    """Refuse arguments of :func:`square_sum` that do not fit."""
    check_tensors("square_sum", "tensors", tensors, FLOATS_AND_DOUBLE)


def square_sum_reference(tensors: Sequence[Tensor]) -> Tensor:
    """:func:`square_sum` in torch."""
    return torch.stack([_tree_sum(tensor.detach().reshape(-1).double().square()) for tensor in tensors])


def _tree_sum(x: Tensor) -> Tensor:
    """Sum of a 1-D tensor by pairs of neighbours; 0-dim."""
    while x.numel() > 1:
        if x.numel() % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[0::2] + x[1::2]
    return x.sum()  # of one entry, or of none


def _square_sum_fake(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device)


_square_sum = define(SCHEMA, check_square_sum, square_sum_reference, _square_sum_fake)
