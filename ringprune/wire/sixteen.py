"""Loops that round float32 values to 16 bits and back, compiled by numba, on host memory.

numba and numpy know no bfloat16 and convert float16 one by one. Here both are whole numbers, and the compiler makes
vectors of the loops.
"""

from typing import Any, TypeAlias

import numpy as np

from ringprune.compiled import bits_of, compiled, float_of

__all__ = ["from_bfloat16", "from_float16", "largest_magnitude", "to_bfloat16", "to_float16"]

Array: TypeAlias = Any  # of numpy; the dtypes stand in the docstrings
Number: TypeAlias = Any

MAGNITUDE = np.uint32(0x7FFFFFFF)
SIGN = np.uint32(0x80000000)
INFINITY = np.uint32(0x7F800000)
LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)

# Between float32 and float16 the exponent moves by 112; below 2^-14 float16 has denormals, which are whole multiples of
# 2^-24: adding 0.5 rounds a float32 to such a multiple and leaves it in the lowest bits.
MOVED = np.uint32(112 << 23)
SMALLEST_NORMAL = np.uint32(113 << 23)
BEYOND_FLOAT16 = np.uint32(143 << 23)
HALF = np.float32(0.5)
HALF_BITS = np.uint32(0x3F000000)
DENORMAL_BASE = np.float32(2.0**-14)
LARGEST_SCALE = np.float32(2.0**113)
BELOW_LARGEST = np.uint32((142 << 23) - (1 << 13))  # times LARGEST_SCALE the largest that is finite


@compiled
def largest_magnitude(values: Array) -> Number:
    """Bits of the largest absolute value (float32), as an unsigned number; those of a NaN are above all others."""
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, bits_of(values[i]) & MAGNITUDE)
    return largest


@compiled
def to_bfloat16(values: Array, codes: Array, rest: Array) -> None:
    """Round to nearest, ties to even; finite values stay finite.

    Args:
        values: float32, shape ``(n,)``.
        codes: uint16, shape ``(n,)``; overwritten with the bits of bfloat16.
        rest: float32, shape ``(n,)``; overwritten with what rounding dropped. May be ``values``.
    """
    if values.ctypes.data == rest.ctypes.data:  # named twice, the compiler would make no vectors of it
        for i in range(values.size):
            rounded = _rounded_to_bfloat16(bits_of(values[i]))
            codes[i] = rounded >> np.uint32(16)
            values[i] -= float_of(rounded)
    else:
        for i in range(values.size):
            rounded = _rounded_to_bfloat16(bits_of(values[i]))
            codes[i] = rounded >> np.uint32(16)
            rest[i] = values[i] - float_of(rounded)


@compiled
def _rounded_to_bfloat16(bits: Number) -> Number:
    magnitude = bits & MAGNITUDE
    odd = (magnitude >> np.uint32(16)) & np.uint32(1)
    rounded = (magnitude + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    quiet = np.uint32(0x7FC00000) if magnitude > INFINITY else INFINITY
    return (min(rounded, LARGEST_BFLOAT16) if magnitude < INFINITY else quiet) | (bits & SIGN)


@compiled
def from_bfloat16(codes: Array, values: Array, add: bool) -> None:
    """Write the values of ``codes`` (uint16) into ``values`` (float32), or add them."""
    for i in range(values.size):
        value = float_of(np.uint32(codes[i]) << np.uint32(16))
        values[i] = values[i] + value if add else value


@compiled
def to_float16(values: Array, scale: Number, inverse: Number, codes: Array, rest: Array) -> None:
    """Scale and round to nearest, ties to even; finite stays finite.

    Args:
        values: float32, shape ``(n,)``.
        scale: float32, a power of two.
        inverse: float32, 1 / scale.
        codes: uint16, shape ``(n,)``; overwritten with the bits of float16.
        rest: float32, shape ``(n,)``; overwritten with what rounding dropped. May be ``values``.
    """
    most = BELOW_LARGEST if inverse == LARGEST_SCALE else INFINITY
    if values.ctypes.data == rest.ctypes.data:  # as in to_bfloat16
        for i in range(values.size):
            code, rounded = _rounded_to_float16(bits_of(values[i] * scale), most)
            codes[i] = code
            values[i] -= float_of(rounded) * inverse
    else:
        for i in range(values.size):
            code, rounded = _rounded_to_float16(bits_of(values[i] * scale), most)
            codes[i] = code
            rest[i] = values[i] - float_of(rounded) * inverse


@compiled
def _rounded_to_float16(bits: Number, most: Number) -> tuple[Number, Number]:
    """The code, and the bits of the float32 that it stands for."""
    magnitude, sign = bits & MAGNITUDE, bits & SIGN
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = min((magnitude + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000), most)
    shifted = float_of(magnitude) + HALF
    small = magnitude < SMALLEST_NORMAL
    code = bits_of(shifted) - HALF_BITS if small else (normal - MOVED) >> np.uint32(13)
    rounded = bits_of(shifted - HALF) if small else normal
    beyond = np.uint32(0x7E00) if magnitude > INFINITY else np.uint32(0x7C00)
    code = code if magnitude < BEYOND_FLOAT16 else beyond
    return code | (sign >> np.uint32(16)), rounded | sign


@compiled
def from_float16(codes: Array, scale: Number, values: Array, add: bool) -> None:
    """Write ``scale`` times the values of ``codes`` (uint16) into ``values`` (float32), or add them."""
    for i in range(values.size):
        code = np.uint32(codes[i])
        magnitude = (code & np.uint32(0x7FFF)) << np.uint32(13)
        denormal = float_of(magnitude + SMALLEST_NORMAL) - DENORMAL_BASE
        exponent = code & np.uint32(0x7C00)
        more = MOVED + MOVED if exponent == np.uint32(0x7C00) else MOVED  # infinity and NaN stay what they are
        bits = bits_of(denormal) if exponent == np.uint32(0) else magnitude + more
        value = float_of(bits | ((code & np.uint32(0x8000)) << np.uint32(16))) * scale
        values[i] = values[i] + value if add else value
