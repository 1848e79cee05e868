"""Host and device: copies to where a bucket's tensors are, and questions for which the host waits once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["differing", "to_device"]


def differing(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Which pairs do not hold the same numbers, by their position; NaN is not the same as itself.

    Args:
        pairs: tensors of one dtype and shape each, all on one device.
    """
    flags: list[Any] = [
        # On a device torch.equal would wait at every pair.
        not torch.equal(left, right) if left.device.type == "cpu" else (left != right).any()
        for left, right in pairs
    ]
    told = torch.stack(flags).tolist() if any(isinstance(flag, Tensor) for flag in flags) else flags
    return [i for i, differs in enumerate(told) if differs]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``, in the order of what the device is given to do.

    From memory that is not pinned, a copy to a GPU would wait for all that comes before it, backward passes included.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
