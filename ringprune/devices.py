"""Copies from host memory to where a bucket's tensors are."""

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``, in the order of what the device is given to do.

    From memory that is not pinned, a copy to a GPU would wait for all that comes before it, backward passes included.
    """
    if device.type != "cuda" or tensor.is_cuda or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
