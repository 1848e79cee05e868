"""Loops over the words of index sets, compiled by numba: bit maps and Elias-Fano codes, on host memory.

They read and write only inside the arrays given, whatever these hold: what comes from another rank may be anything.
"""

from typing import Any, TypeAlias

import numpy as np

from ringprune.compiled import compiled, ones, trailing_zeros

__all__ = ["fill_bitmap", "fill_elias_fano", "read_bitmap", "read_elias_fano"]

# numba finds types out by itself; the dtypes of arrays stand in the docstrings.
Array: TypeAlias = Any
Number: TypeAlias = Any
Flag: TypeAlias = Any


@compiled
def fill_bitmap(positions: Array, words: Array) -> None:
    """Set the bits at ``positions`` (int32, ascending, below 64 * len(words)) of ``words`` (uint64, zeros)."""
    current, word = 0, np.uint64(0)
    for position in positions:
        place = position >> 6
        if place != current:
            words[current] = word
            current, word = place, np.uint64(0)
        word |= np.uint64(1) << np.uint64(position & 63)
    if positions.size:
        words[current] = word


@compiled
def read_bitmap(words: Array, numel: Number, positions: Array) -> Flag:
    """Write the numbers of the bits set into ``positions`` (int32); False unless they are as many, below ``numel``."""
    count = 0
    for place in range(words.size):
        word = words[place]
        while word != np.uint64(0):
            position = (place << 6) + np.int64(trailing_zeros(word))
            if count == positions.size or position >= numel:
                return False
            positions[count] = position
            count += 1
            word &= word - np.uint64(1)
    return np.bool_(count == positions.size)


@compiled
def fill_elias_fano(positions: Array, width: Number, highs: Array, lows: Array) -> None:
    """Write ``positions`` (int32, ascending): their ``width`` low bits one after another, the rest in unary.

    Bit ``(position >> width) + i`` of ``highs`` is set for the i-th position; both arrays are uint64, zeros.
    """
    low_mask, bits = np.uint64((1 << width) - 1), np.uint64(width)
    current, word = np.int64(0), np.uint64(0)
    filled, shift, low_word = 0, np.uint64(0), np.uint64(0)
    for i in range(positions.size):
        position = np.uint64(positions[i])
        high = np.int64(position >> bits) + i
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
    if positions.size:
        highs[current] = word
    if shift:
        lows[filled] = low_word


@compiled
def read_elias_fano(highs: Array, lows: Array, width: Number, numel: Number, positions: Array) -> Flag:
    """Write the positions coded into ``positions`` (int32).

    False unless they are as many, ascend, and are below ``numel``. ``lows`` holds ``width`` bits for each.
    """
    low_mask, bits, wanted = np.uint64((1 << width) - 1), np.uint64(width), np.uint64(positions.size)
    # Unsigned throughout: an index that may be negative costs numba a branch.
    count, bit, base = np.uint64(0), np.uint64(0), np.uint64(0)
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
    return ascending and count == wanted and last < numel
