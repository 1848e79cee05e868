"""One call of a collective: what it was called with, what all ranks have to agree on, and how errors name it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringprune.comm.communicator import Ability

__all__ = ["LARGEST_COUNT", "Call"]

LARGEST_COUNT = 2**31 - 1  # elements of one buffer over MPI, which counts in C ints


@dataclass(frozen=True)
class Call:
    """What one rank called, without the data.

    Attributes:
        op: the collective.
        name: what the caller named it.
        dtype: of the tensor.
        shape: of this rank's tensor.
        root: rank whose tensor is broadcast.
        sizes: rows that each rank contributes to an allgather.
        splits: rows that this rank sends to each rank in an alltoall.
        received: rows that this rank gets from each rank in an alltoall.
    """

    op: Ability
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    root: int | None = None
    sizes: tuple[int, ...] | None = None
    splits: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None

    def __str__(self) -> str:
        source = "" if self.root is None else f" from rank {self.root}"
        extent = "x".join(map(str, self.shape)) or "1"
        sizes = "" if self.sizes is None or len(set(self.sizes)) == 1 else f", sizes {list(self.sizes)}"
        return f'"{self.name}" ({self.op}{source} of {extent} {str(self.dtype).removeprefix("torch.")}{sizes})'

    @property
    def agreed(self) -> tuple[object, ...]:
        """What has to be equal on all ranks; rows of an allgather or alltoall may differ."""
        return self.op, self.name, self.dtype, self.row if self.by_rows else self.shape, self.root, self.sizes

    @property
    def by_rows(self) -> bool:
        """Whether the ranks may contribute different numbers of rows."""
        return self.op in ("allgather", "alltoall")

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def row_numel(self) -> int:
        """Elements in one row."""
        return torch.Size(self.row).numel()

    @property
    def largest_count(self) -> int:
        """Elements in the longest buffer of this call."""
        rows = max(sum(self.sizes or ()), sum(self.splits or ()), sum(self.received or ()))
        return rows * self.row_numel if self.by_rows else torch.Size(self.shape).numel()

    def new_result(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor for what an allgather or alltoall of ``tensor`` returns."""
        rows = self.sizes if self.op == "allgather" else self.received
        return tensor.new_empty((sum(rows or ()), *self.row), requires_grad=False)
