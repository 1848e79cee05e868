"""Elias-Fano codes of ascending positions, on host memory: loops compiled by numba, two threads where it is worth it.

The ``width`` low bits of each position stand one after another in ``lows``; bit ``(position >> width) + i`` of
``highs`` is set for the i-th position. Both are uint64.

Loops read and write only inside the arrays given, whatever these hold: what comes from another rank may be anything.
"""

from typing import Any, TypeAlias

import numpy as np
import torch

from ringprune.compiled import compiled, ones, trailing_zeros
from ringprune.threads import side_by_side

__all__ = ["PARALLEL", "fill_elias_fano", "read_elias_fano"]

# numba finds types out by itself; the dtypes of arrays stand in the docstrings.
Array: TypeAlias = Any
Number: TypeAlias = Any
Flag: TypeAlias = Any

LARGEST = np.int64(2**31 - 1)
PARALLEL = 1 << 17
"""Positions from which two threads share the work, if torch may use two."""


def fill_elias_fano(positions: Array, width: int, highs: Array, lows: Array) -> None:
    """Write ``positions`` (int32, ascending) into ``highs`` and ``lows``, which hold zeros."""
    middle = _quiet_place(positions, width) if _in_parallel(positions.size) else 0
    second = positions[middle:], middle, width, highs, lows[middle * width // 64 :]
    if not middle:
        _fill(*second)
        return
    side_by_side([lambda: _fill(positions[:middle], 0, width, highs, lows), lambda: _fill(*second)])


def read_elias_fano(highs: Array, lows: Array, width: int, numel: int, positions: Array) -> bool:
    """Write the positions coded into ``positions`` (int32); ``lows`` holds ``width`` bits for each.

    Returns:
        Whether they are as many, ascend, and are below ``numel``.
    """
    place = highs.size // 2 if _in_parallel(positions.size) else 0
    middle = int(_count(highs[:place]))
    if middle > positions.size:
        return False
    results = [True, True]

    def read(part: int, begin: int, end: int, first: int, last: int) -> None:
        results[part] = bool(_read(highs[begin:end], 64 * begin, first, lows, width, positions[first:last]))

    if place:
        rest = (place, highs.size, middle, positions.size)
        side_by_side([lambda: read(0, 0, place, 0, middle), lambda: read(1, *rest)])
    else:
        read(1, 0, highs.size, 0, positions.size)
    joined = 0 in (middle, positions.size - middle) or positions[middle - 1] < positions[middle]
    return all(results) and bool(joined) and (not positions.size or int(positions[-1]) < numel)


def _in_parallel(count: int) -> bool:
    return count >= PARALLEL and torch.get_num_threads() > 1


def _quiet_place(positions: Array, width: int) -> int:
    """A number of positions near the half whose two sides share no word of either array; 0 if none is near."""
    half = positions.size // 128 * 64
    for middle in range(half, min(half + 64 * 200, positions.size), 64):
        before = ((int(positions[middle - 1]) >> width) + middle - 1) >> 6
        if before < ((int(positions[middle]) >> width) + middle) >> 6:
            return middle
    return 0


@compiled
def _fill(positions: Array, first: Number, width: Number, highs: Array, lows: Array) -> None:
    """Write some positions, the first of which is number ``first`` of all; ``lows`` begins with its low bits."""
    low_mask, bits = np.uint64((1 << width) - 1), np.uint64(width)
    if not positions.size:
        return
    current, word = ((np.int64(positions[0]) >> width) + first) >> 6, np.uint64(0)
    filled, shift, low_word = 0, np.uint64(0), np.uint64(0)
    for i in range(positions.size):
        position = np.uint64(positions[i])
        high = np.int64(position >> bits) + first + i
        place = high >> 6
        if place != current:
            highs[current] = word
            current, word = place, np.uint64(0)
        word |= np.uint64(1) << np.uint64(high & 63)
        low = position & low_mask
        low_word |= low << shift
        shift += bits
        if shift >= np.uint64(64):
            lows[filled] = low_word
            filled += 1
            shift -= np.uint64(64)
            low_word = low >> (bits - shift)
    highs[current] = word
    if shift:
        lows[filled] = low_word


@compiled
def _count(words: Array) -> Number:
    """Number of bits set."""
    total = np.uint64(0)
    for i in range(words.size):
        total += ones(words[i])
    return total


@compiled
def _read(highs: Array, bits_before: Number, first: Number, lows: Array, width: Number, positions: Array) -> Flag:
    """Write the positions coded by ``highs``, before which there are ``bits_before`` bits, ``first`` of them set.

    False unless they are as many as there is room for, ascend, and fit into int32.
    """
    low_mask, bits, wanted = np.uint64((1 << width) - 1), np.uint64(width), np.uint64(positions.size)
    # Unsigned throughout: an index that may be negative costs numba a branch.
    count, bit, base = np.uint64(0), np.uint64(first) * bits, np.uint64(bits_before) - np.uint64(first)
    last: Number = np.int64(-1)
    ascending: Flag = np.bool_(True)
    for place in range(highs.size):
        word = highs[place]
        if count + ones(word) > wanted:
            return False
        while word != np.uint64(0):
            high = base + trailing_zeros(word) - count
            low = np.uint64(0)
            if width:
                at, shift = bit >> np.uint64(6), bit & np.uint64(63)
                low = lows[at] >> shift
                if shift + bits > np.uint64(64):
                    low |= lows[at + np.uint64(1)] << (np.uint64(64) - shift)
                bit += bits
            position = np.int64((high << bits) | (low & low_mask))
            ascending &= position > last
            positions[count] = position
            last = position
            count += np.uint64(1)
            word &= word - np.uint64(1)
        base += np.uint64(64)
    return ascending and count == wanted and last <= LARGEST  # beyond it int32 has cut it, to a negative one
