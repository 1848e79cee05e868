"""Which rank owns which row of a table, and where among its rows: facts that are equal on every rank."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError

__all__ = ["Owners"]


@dataclass(frozen=True)
class Owners:
    """A table's rows in partitions, and the partitions on ranks.

    Row ``r`` is in partition ``r % partitions``, and partition ``p`` on rank ``p % ranks``. In a vocabulary sorted by
    frequency, as most are, neighbours are about equally frequent: so every owner gets its share of the frequent rows.

    Args:
        rows: of the table.
        partitions: how many it is cut into; fewer than ranks leaves some without any, more gives each several.
        ranks: how many there are.

    Raises:
        ConfigurationError: there are more partitions than rows.
    """

    rows: int
    partitions: int
    ranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.partitions <= self.rows:
            raise ConfigurationError(f"partitions={self.partitions}: from 1 to the number of rows, {self.rows}")

    def rank_of(self, rows: Tensor) -> Tensor:
        """The owners of ``rows``."""
        return rows % self.partitions % self.ranks

    def position_of(self, rows: Tensor) -> Tensor:
        """Where each of ``rows`` lies among its owner's."""
        if self.partitions <= self.ranks:
            return rows // self.partitions
        return _starts(self).to(rows.device)[rows % self.partitions] + rows // self.partitions

    def rows_of(self, rank: int) -> Tensor:
        """The rows that ``rank`` owns, int64, in the order in which it has them."""
        own = [torch.arange(p, self.rows, self.partitions, device="cpu") for p in self._partitions_of(rank)]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.int64, device="cpu")

    def count_of(self, rank: int) -> int:
        """How many rows ``rank`` owns."""
        return sum(self.length(p) for p in self._partitions_of(rank))

    def length(self, partition: int) -> int:
        """How many rows a partition has."""
        return -(-(self.rows - partition) // self.partitions)

    def _partitions_of(self, rank: int) -> range:
        return range(rank, self.partitions, self.ranks)


@cache
def _starts(owners: Owners) -> Tensor:
    """Where each partition starts among its owner's rows."""
    starts: list[int] = []
    for p in range(owners.partitions):
        before = p - owners.ranks
        starts.append(0 if before < 0 else starts[before] + owners.length(before))
    return torch.tensor(starts, device="cpu")
