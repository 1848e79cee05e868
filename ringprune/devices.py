"""Host and device: copies to where a bucket's tensors are, and questions for which the host waits once."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["differing", "to_device"]


def differing(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Which pairs do not hold the same numbers, by their position; NaN is not the same as itself.

    Args:
        pairs: tensors of one dtype, shape and device each.
    """
    found: list[int] = []
    asked: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, (left, right) in enumerate(pairs):
        if left.device.type != "cpu":  # torch.equal would wait for the device at every pair
            asked.setdefault(left.device, []).append((i, (left != right).any()))
        elif not torch.equal(left, right):
            found.append(i)
    for flags in asked.values():
        told = torch.stack([flag for _, flag in flags]).tolist()
        found += [i for (i, _), differs in zip(flags, told, strict=True) if differs]
    return sorted(found)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``, in the order of what the device is given to do.

    From memory that is not pinned, a copy to a GPU would wait for all that comes before it, backward passes included.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
