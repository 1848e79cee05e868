"""How many partitions a table is best cut into: Parallax's cost model and its search.

Kim et al., EuroSys 2019 (arXiv 1808.02621), section 4.2: t(n) = b/n + a (n - 1) + c. More partitions share the work of
the owners (b), and cost a message each (a).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["PartitionCost", "PartitionSearch", "fit", "search"]

FEWEST = 3
"""Measurements that the three numbers need."""


@dataclass(frozen=True)
class PartitionCost:
    """The model of one table on one cluster.

    Attributes:
        a: seconds that each partition after the first costs.
        b: seconds that are shared by all partitions.
        c: seconds that do not depend on them.
    """

    a: float
    b: float
    c: float

    def seconds(self, partitions: int) -> float:
        """t(n)."""
        return self.b / partitions + self.a * (partitions - 1) + self.c

    def best(self, numbers: Iterable[int]) -> int:
        """The cheapest of ``numbers``; the lowest where several are."""
        return min(sorted(numbers), key=self.seconds)


@dataclass(frozen=True)
class PartitionSearch:
    """What a search has found.

    Attributes:
        best: number of partitions to take.
        seconds: what was measured, by number of partitions.
        cost: the model fitted to it; None where there was too little.
    """

    best: int
    seconds: Mapping[int, float]
    cost: PartitionCost | None


def fit(seconds: Mapping[int, float]) -> PartitionCost:
    """The model nearest to what was measured, by least squares; at least three measurements."""
    numbers = np.array(list(seconds), dtype=float)
    terms = np.stack([numbers - 1, 1 / numbers, np.ones_like(numbers)], axis=1)
    (a, b, c), *_ = np.linalg.lstsq(terms, np.array(list(seconds.values())), rcond=None)
    return PartitionCost(float(a), float(b), float(c))


def search(measure: Callable[[int], float], start: int, most: int) -> PartitionSearch:
    """Parallax's search: double while it gets faster, or halve where doubling does not; then the model decides.

    Here among the numbers that were tried: partitions are dealt out to ranks, and others would not come out even.

    Args:
        measure: seconds that one step takes with so many partitions; the same on all ranks.
        start: where to begin; Parallax takes the number of machines.
        most: more partitions than this are not tried.
    """
    seconds = {start: measure(start)}

    def walk(number: int, following: Callable[[int], int]) -> None:
        while 1 <= following(number) <= most and following(number) != number:
            previous, number = number, following(number)
            seconds[number] = measure(number)
            if seconds[number] >= seconds[previous]:
                return

    walk(start, lambda number: 2 * number)
    if min(seconds, key=seconds.__getitem__) == start:
        walk(start, lambda number: number // 2)
    if len(seconds) < FEWEST:
        return PartitionSearch(min(seconds, key=seconds.__getitem__), seconds, None)
    cost = fit(seconds)
    return PartitionSearch(cost.best(seconds), seconds, cost)
