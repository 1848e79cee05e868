"""Memory that outlives the gradients made in it, so that each is new to autograd and costs no allocation."""

import torch
from torch import Tensor

__all__ = ["Memory"]


class Memory:
    """Memory for a float32 tensor, with no tensor on it: one made there is alone in it, as real gradients are.

    Args:
        shape: of the tensor.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._storage = shape, torch.empty(shape).untyped_storage()

    def tensor(self) -> Tensor:
        """A new tensor of what is there."""
        return torch.empty(0).set_(self._storage, 0, self._shape)
