"""Memory that outlives the gradients made in it, so that each is new to autograd and costs no allocation."""

from math import prod

import torch
from torch import Tensor

__all__ = ["Memory"]


class Memory:
    """Memory for a float32 tensor, with no tensor on it: one made there is alone in it, as real gradients are.

    Args:
        shape: of the tensor.
        spare: entries more than that, for tensors that begin elsewhere.
    """

    def __init__(self, shape: tuple[int, ...], spare: int = 0) -> None:
        self._shape, self._storage = shape, torch.empty(prod(shape) + spare).untyped_storage()

    def tensor(self, start: int = 0) -> Tensor:
        """A new tensor of what is there, from an entry on."""
        return torch.empty(0).set_(self._storage, start, self._shape)

    def all(self) -> Tensor:
        """All of it, spare entries included, in one dimension."""
        return torch.empty(0).set_(self._storage)
