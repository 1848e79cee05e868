"""Loops that quantise values to whole numbers of one scale per block, compiled by numba, on host memory."""

from typing import Any, TypeAlias

import numpy as np

from ringprune.compiled import bits_of, compiled, float_of

__all__ = ["BLOCK", "dequantise", "quantise"]

BLOCK = 256
"""Values that share a scale: a bfloat16 of 16 bits, 0.06 bits per value."""

SMALLEST = np.float32(2.0**-126)
INFINITY, NOT_A_NUMBER = np.uint32(0x7F800000), np.uint16(0x7FC0)  # bits of a float32, of a bfloat16
MAGNITUDE = np.uint32(0x7FFFFFFF)

Array: TypeAlias = Any  # of numpy; the dtypes stand in the docstrings


@compiled
def quantise(values: Array, levels: int, scales: Array, codes: Array, rest: Array) -> None:
    """Round each value to the nearest multiple of its block's scale, ties to even.

    The scale is the largest magnitude over ``levels``, rounded up to bfloat16, or down where that would overflow. Then
    ``code * scale`` is exact in float32, and so is what rounding drops: ``value = code * scale + rest`` without error.
    A block with NaN or infinity becomes NaN, and its rest too.

    Args:
        values: float32, shape ``(n,)``.
        levels: largest code.
        scales: uint16, one per block; overwritten with the bits of a bfloat16.
        codes: int8, shape ``(n,)``; overwritten.
        rest: float32, shape ``(n,)``; overwritten. May be ``values``.
    """
    for block in range(scales.size):
        lo = block * BLOCK
        hi = min(lo + BLOCK, values.size)
        bits = np.uint32(0)  # of the largest magnitude: as floats a NaN would be lost among the others
        for i in range(lo, hi):
            bits = max(bits, bits_of(values[i]) & MAGNITUDE)
        if bits >= INFINITY:
            scales[block] = NOT_A_NUMBER
            for i in range(lo, hi):
                codes[i] = 0
                rest[i] = np.float32(np.nan)
            continue
        largest = float_of(bits)
        rounded = (bits_of(np.float32(largest / np.float32(levels))) + np.uint32(0xFFFF)) >> np.uint32(16)
        if np.isinf(float_of(rounded << np.uint32(16)) * np.float32(levels)):
            rounded -= np.uint32(1)
        scales[block] = rounded
        scale = float_of(rounded << np.uint32(16))
        if not (scale >= SMALLEST):  # its reciprocal would be infinite: values below 1e-35 wait until they are more
            for i in range(lo, hi):
                codes[i] = 0
                rest[i] = values[i]
            continue
        inverse = np.float32(1) / scale
        for i in range(lo, hi):
            # By the reciprocal the nearest code may be missed by a hair, which costs nothing: the rest is exact.
            code = np.rint(values[i] * inverse)
            code = min(max(code, np.float32(-levels)), np.float32(levels))
            codes[i] = np.int8(code)
            rest[i] = values[i] - np.float32(code) * scale


@compiled
def dequantise(scales: Array, codes: Array, values: Array, add: bool) -> None:
    """Write ``code * scale`` for each of ``codes`` (int8) into ``values`` (float32), or add it."""
    for block in range(scales.size):
        scale = float_of(np.uint32(scales[block]) << np.uint32(16))
        for i in range(block * BLOCK, min(block * BLOCK + BLOCK, values.size)):
            value = np.float32(codes[i]) * scale
            values[i] = values[i] + value if add else value
