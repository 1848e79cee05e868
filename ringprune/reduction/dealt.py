"""Which rank sums an entry: entries are dealt like cards, so that every hand gets as many wherever the entries lie.

Of each group of neighbours every hand gets one; which one is drawn for each group by a hash. So the place of an entry
in its hand is the number of its group. No pattern of the entries (rows of an embedding, columns of a matrix) loads one
rank more than another, and nothing has to be measured, sent or kept to balance them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringprune.compiled import compiled

__all__ = ["Dealing", "dealing"]

SMALLEST_SHARE = 32
"""Entries that a rank keeps at least: of fewer, its largest would often not be among the largest of all, and the frames
of messages would be more than what is in them. What is less than that for each rank is dealt to fewer."""

Indices = NDArray[np.int32]
# numba finds types out by itself.
Array: TypeAlias = Any
Number: TypeAlias = Any


@dataclass(frozen=True)
class Dealing:
    """How a range of entries is dealt, and how many each rank keeps; equal on every rank. Made by :func:`dealing`.

    Attributes:
        numel: length of the range.
        total: how many entries are kept, all hands together.
        hands: how many ranks have a hand.
        size: number of ranks.
        turn: which of the ranks has the first hand; those after it have the others.
    """

    numel: int
    total: int
    hands: int
    size: int
    turn: int

    @property
    def groups(self) -> int:
        """Groups of neighbours; places in a hand are below."""
        return -(-self.numel // self.hands)

    @property
    def expected(self) -> int:
        """How many entries a message holds if all ranks propose ``total``, rounded up."""
        return -(-self.total // self.hands)

    @cached_property
    def lengths(self) -> list[int]:
        """How many entries each rank is dealt."""
        whole, rest = divmod(self.numel, self.hands)
        turned = _turned(whole, self.hands)
        return self._of_ranks([whole + ((hand - turned) % self.hands < rest) for hand in range(self.hands)])

    @cached_property
    def shares(self) -> list[int]:
        """How many entries each rank keeps: the same part of what it is dealt."""
        ends = np.cumsum([0, *(self.lengths[self._rank(hand)] for hand in range(self.hands))])
        return self._of_ranks(np.diff(self.total * ends // max(1, self.numel)).tolist())

    def deal(self, indices: Indices) -> list[Indices]:
        """Which of ``indices``, which ascend, each rank is dealt: their positions among them, ascending."""
        begins, order = np.zeros(self.hands + 1, np.int64), np.empty(indices.size, np.int32)
        _deal(indices, self.hands, begins, order)
        dealt = [np.empty(0, np.int32)] * self.size
        for hand in range(self.hands):
            dealt[self._rank(hand)] = order[begins[hand] : begins[hand + 1]]
        return dealt

    def places(self, indices: Indices) -> Indices:
        """The place of each entry in its hand."""
        return indices // np.int32(self.hands)

    def indices(self, places: Indices, rank: int) -> Indices:
        """The entries at ``places`` of a rank's hand; whether they are in the range is for the caller to see."""
        indices = np.empty_like(places)
        _indices(places, (rank - self.turn) % self.size, self.hands, indices)
        return indices

    def _rank(self, hand: int) -> int:
        return (hand + self.turn) % self.size

    def _of_ranks(self, numbers: list[int]) -> list[int]:
        """Numbers of the hands as those of the ranks; 0 for a rank that has none."""
        mine = [*numbers, *[0] * (self.size - self.hands)]
        return [mine[(rank - self.turn) % self.size] for rank in range(self.size)]


def dealing(numel: int, total: int, size: int, turn: int = 0) -> Dealing:
    """How ``numel`` entries are dealt to ``size`` ranks, of which ``total`` are kept.

    Args:
        numel: length of the range, below 2^31.
        total: how many entries are kept, at most ``numel``.
        size: number of ranks.
        turn: any number, the same on all ranks: where few ranks have a hand, others have it at another turn.
    """
    return Dealing(numel, total, max(1, min(size, total // SMALLEST_SHARE)), size, turn % size)


@compiled
def _turned(group: Number, hands: Number) -> Number:
    """By how many hands the dealing of a group is turned: its number, mixed (SplitMix64), below ``hands``."""
    state = (np.uint64(group) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((state >> np.uint64(32)) * np.uint64(hands) >> np.uint64(32))


@compiled
def _deal(indices: Array, hands: Number, begins: Array, order: Array) -> None:
    """Sort by hand: where each begins in ``order``, and the positions of its entries."""
    dealt = np.empty(indices.size, np.int32)
    for i in range(indices.size):
        group = indices[i] // hands
        hand = indices[i] - group * hands + _turned(group, hands)  # a remainder takes longer than to compare
        dealt[i] = hand - hands if hand >= hands else hand
        begins[dealt[i] + 1] += 1
    for hand in range(hands):
        begins[hand + 1] += begins[hand]
    free = begins[:-1].copy()
    for i in range(indices.size):
        order[free[dealt[i]]] = i
        free[dealt[i]] += 1


@compiled
def _indices(places: Array, hand: Number, hands: Number, indices: Array) -> None:
    for i in range(places.size):
        group = np.int64(places[i])
        place = hand - _turned(group, hands)
        indices[i] = group * hands + (place + hands if place < 0 else place)
