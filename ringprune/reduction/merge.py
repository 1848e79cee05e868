"""Adding lists of (index, value) pairs, compiled by numba, on host memory.

What comes out does not depend on how it is computed: equal indices are added in float32 in the order of the lists, and
the indices are those that stand in a list.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringprune.compiled import compiled

__all__ = ["ABSENT", "Pairs", "add_pairs", "among", "ascending_within", "densify", "sparsify"]

Pairs = tuple[NDArray[np.int32], NDArray[np.float32]]

ABSENT = np.float32(-0.0)
"""What stands in a dense piece where there is no entry: ``x + -0.0`` is ``x``, bit for bit, for every x, and no sum of
entries is -0.0, as no entry is (:func:`densify`)."""

SCAN_COST = 0.25
"""What an entry of the range costs in a dense sum, of what an entry costs in a merge; measured."""


def add_pairs(lists: Sequence[Pairs | NDArray[np.float32]], numel: int) -> Pairs:
    """The union of the lists' indices, and the sums of their values.

    Args:
        lists: int32 indices, ascending, in ``[0, numel)``, and their float32 values; or a dense list, float32, shape
            ``(numel,)``, from :func:`densify`.
        numel: length of the range.

    Returns:
        int32 indices, ascending, and float32 values; -0.0 is given back as 0.0.
    """
    entries = [numel if isinstance(each, np.ndarray) else each[0].size for each in lists]
    # Merging one list after another reads what has been merged again and again.
    merged = sum(size * (len(lists) - place) for place, size in enumerate(entries))
    if merged > SCAN_COST * numel:
        return sparsify(_dense_sum(lists, numel))
    total: Pairs = np.empty(0, np.int32), np.empty(0, np.float32)
    for each in lists:
        indices, values = sparsify(each) if isinstance(each, np.ndarray) else each
        out = np.empty(total[0].size + indices.size, np.int32), np.empty(total[0].size + indices.size, np.float32)
        size = _merge(*total, indices, values, *out)
        total = out[0][:size], out[1][:size]
    return total


def densify(indices: NDArray[np.int32], values: NDArray[np.float32], numel: int) -> NDArray[np.float32]:
    """The pairs as float32, shape ``(numel,)``, with ``ABSENT`` where there is none; -0.0 becomes 0.0."""
    dense = np.full(numel, ABSENT)
    dense[indices] = values + np.float32(0)
    return dense


def sparsify(dense: NDArray[np.float32]) -> Pairs:
    """The entries of ``dense`` that are not ``ABSENT``."""
    indices = np.flatnonzero(dense.view(np.uint32) != _ABSENT_BITS).astype(np.int32)
    return indices, dense[indices]


def ascending_within(indices: NDArray[np.int32], numel: int) -> bool:
    """Whether the indices ascend strictly and lie in ``[0, numel)``."""
    return indices.size == 0 or bool(indices[0] >= 0 and indices[-1] < numel and _ascend(indices))


def among(indices: NDArray[np.int32], others: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which of the indices are among the others; both ascend."""
    found = np.empty(indices.size, np.bool_)
    _find(indices, others, found)
    return found


_ABSENT_BITS = np.uint32(0x80000000)


def _dense_sum(lists: Sequence[Pairs | NDArray[np.float32]], numel: int) -> NDArray[np.float32]:
    dense = np.full(numel, ABSENT)
    for each in lists:
        if isinstance(each, np.ndarray):
            dense += each
        else:
            _scatter(dense, *each)
    return dense


@compiled
def _scatter(dense: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
    for i in range(indices.size):
        dense[indices[i]] += values[i] + np.float32(0)


@compiled
def _ascend(indices: np.ndarray) -> bool:
    ascending = True
    for i in range(1, indices.size):
        ascending &= indices[i - 1] < indices[i]
    return ascending


@compiled
def _find(indices: np.ndarray, others: np.ndarray, found: np.ndarray) -> None:
    j = 0
    for i in range(indices.size):
        while j < others.size and others[j] < indices[i]:
            j += 1
        found[i] = j < others.size and others[j] == indices[i]


@compiled
def _merge(
    left: np.ndarray,
    left_values: np.ndarray,
    right: np.ndarray,
    right_values: np.ndarray,
    out: np.ndarray,
    out_values: np.ndarray,
) -> int:
    """Merge two ascending lists; equal indices become one, left value plus right. Returns how many there are."""
    i = j = size = 0
    while i < left.size and j < right.size:
        a, b = left[i], right[j]
        out[size] = min(a, b)
        # The absent side adds -0.0; 0.0 is added to the right, as it may bring a -0.0.
        value = right_values[j] + np.float32(0) if b <= a else ABSENT
        out_values[size] = (left_values[i] if a <= b else ABSENT) + value
        i += a <= b
        j += b <= a
        size += 1
    while i < left.size:
        out[size] = left[i]
        out_values[size] = left_values[i]
        i += 1
        size += 1
    while j < right.size:
        out[size] = right[j]
        out_values[size] = right_values[j] + np.float32(0)
        j += 1
        size += 1
    return size
