"""Loops over the words of bit maps, compiled by numba, on host memory.

They read and write only inside the arrays given, whatever these hold: what comes from another rank may be anything.
"""

from typing import Any, TypeAlias

import numpy as np

from ringprune.compiled import compiled, ones, trailing_zeros

__all__ = ["count_bits", "read_bitmap", "set_bits"]

# numba finds types out by itself; the dtypes of arrays stand in the docstrings.
Array: TypeAlias = Any
Number: TypeAlias = Any
Flag: TypeAlias = Any


@compiled
def set_bits(positions: Array, words: Array) -> Number:
    """Set the bits at ``positions`` (int32, ascending, below 64 * len(words)) of ``words`` (uint64).

    Returns how many of them were not set before.
    """
    if positions.size == 0:
        return np.int64(0)
    # From its first word on, for other threads may be at those before.
    current, word, new = positions[0] >> 6, np.uint64(0), np.uint64(0)
    for position in positions:
        place = position >> 6
        if place != current:
            new += ones(word & ~words[current])
            words[current] |= word
            current, word = place, np.uint64(0)
        word |= np.uint64(1) << np.uint64(position & 63)
    new += ones(word & ~words[current])
    words[current] |= word
    return np.int64(new)


@compiled
def count_bits(words: Array) -> Number:
    """How many bits of ``words`` (uint64) are set."""
    count = np.uint64(0)
    for word in words:
        count += ones(word)
    return np.int64(count)


@compiled
def read_bitmap(words: Array, numel: Number, positions: Array, first: Number = 0) -> Flag:
    """Write the numbers of the bits set into ``positions`` (int32); False unless they are as many, below ``numel``.

    Numbers begin with ``first``.
    """
    count = 0
    for place in range(words.size):
        word = words[place]
        while word != np.uint64(0):
            position = first + (place << 6) + np.int64(trailing_zeros(word))
            if count == positions.size or position >= numel:
                return False
            positions[count] = position
            count += 1
            word &= word - np.uint64(1)
    return np.bool_(count == positions.size)
