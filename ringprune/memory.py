"""Whether a tensor's memory is its own: what is summed where it is must not be read by anybody else meanwhile."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["held_alone", "is_shared", "overlapping"]

_count = getattr(torch._C, "_storage_Use_Count", None)
"""Tensors on a storage; autograd asks the same before it adds to a gradient in place, and torch has no public name."""


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(_count(storage._cdata)) if _count is not None else 0


_ALONE = _holders(torch.empty(1, device="cpu"))
"""The count of a new tensor, that of the object which asks included."""


def held_alone(tensor: Tensor) -> bool:
    """Whether no other tensor lies in the memory of this one; False where torch does not tell.

    Autograd takes over gradients that are views of what it still reads (of ``h + p.unsqueeze(0)`` those of ``h`` and
    ``p`` are one), parameters may share one gradient, and users keep all gradients in one flat tensor.
    """
    return _count is not None and not tensor.requires_grad and _holders(tensor) <= _ALONE


def is_shared(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a dense tensor is a part of a larger one, or lies in the memory of another dense one of ``others``."""
    storage = tensor.untyped_storage()
    if storage.nbytes() > tensor.nbytes:
        return True
    dense = [other for other in others if other is not tensor and other.layout == torch.strided]
    return any(other.untyped_storage().data_ptr() == storage.data_ptr() for other in dense)


def overlapping(tensors: Sequence[Tensor]) -> list[int]:
    """Positions of tensors that share memory with another one: all but the one that lies first there.

    Of ``a + b`` autograd makes one gradient for both; what is written into one must not be read as the other.

    Args:
        tensors: contiguous; sparse ones are left out, into whose values nothing is written.
    """
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, t in enumerate(tensors) if t.layout == torch.strided]
    found, reached = [], 0
    for begin, end, i in sorted(spans):
        if begin < min(end, reached):
            found.append(i)
        reached = max(reached, end)
    return found
