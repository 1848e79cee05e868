"""The bytes that :mod:`~ringprune.wire.sixteen` and :mod:`~ringprune.wire.quantise` make, by operations of torch.

For values on a device, which stay there. Divisors are tensors: instead of dividing by a number torch multiplies by its
reciprocal on CUDA.
"""

import math

import torch
from torch import Tensor

from ringprune.wire.quantise import BLOCK

__all__ = ["LEVELS", "decoded", "encode"]

LEVELS = {"int8": 127, "int4": 7}

INFINITY, NOT_A_NUMBER = 0x7F800000, 0x7FC0  # bits of a float32, of a bfloat16
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST_SCALE = 2.0**113
BELOW_LARGEST = 2.0**15 - 2.0**4  # times LARGEST_SCALE the largest that is finite


def encode(coding: str, values: Tensor, rest: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Code some values.

    Args:
        coding: bf16, fp16, int8 or int4.
        values: float32 [n].
        rest: float32 [n]; overwritten with what rounding drops. May be ``values``.
        scales: uint8, zeros, beginning at a multiple of 8 bytes; its first are overwritten.
        codes: the same.
    """
    if coding in LEVELS:
        made, whole = _quantise(values, LEVELS[coding], rest)
        _write(whole if coding == "int8" else _joined(whole), codes)
        _write(made, scales)
    elif coding == "bf16":
        rounded = _clamped(values, LARGEST_BFLOAT16).to(torch.bfloat16)
        torch.sub(values, rounded.float(), out=rest)
        _write(rounded, codes)
    else:
        scale, inverse = _powers(values)
        scaled = values * scale
        rounded = torch.where(inverse == LARGEST_SCALE, _clamped(scaled, BELOW_LARGEST), scaled).to(torch.float16)
        torch.sub(values, _never_beyond(scaled, rounded) * inverse, out=rest)
        _write(rounded, codes)
        _write(inverse.view(1), scales)


def decoded(coding: str, scales: Tensor, codes: Tensor, count: int) -> Tensor:
    """The values of what :func:`encode` wrote, float32 [``count``]."""
    if coding == "bf16":
        return codes[: 2 * count].view(torch.bfloat16).float()
    if coding == "fp16":
        return codes[: 2 * count].view(torch.float16).float() * scales[:4].view(torch.float32)
    whole = codes[:count].view(torch.int8) if coding == "int8" else _split(codes)[:count]
    scale = scales[: 2 * -(-count // BLOCK)].view(torch.int16).int() << 16
    return whole.float() * scale.view(torch.float32).repeat_interleave(BLOCK)[:count]


def _write(made: Tensor, into: Tensor) -> None:
    parts = made.contiguous().view(torch.uint8)
    into[: parts.numel()] = parts


def _clamped(values: Tensor, most: float) -> Tensor:
    """Finite values brought to ``most`` and its negative; infinity and NaN stay."""
    return torch.where(values.isfinite(), values.clamp(-most, most), values)


def _never_beyond(scaled: Tensor, rounded: Tensor) -> Tensor:
    """What was rounded to float16, with its precision alone where finite numbers are beyond it.

    As they may be beside infinity and NaN, when nothing is scaled: such a step is not made, and rests stay finite.
    """
    bits = scaled.view(torch.int32)
    near = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(rounded.isinf() & scaled.isfinite(), near, rounded.float())


def _magnitudes(values: Tensor) -> Tensor:
    """Their bits, int32: as floats a NaN could be lost among others."""
    return values.view(torch.int32) & 0x7FFFFFFF


def _powers(values: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two that brings the largest value into [2^14, 2^15), and its inverse; 1 where there is none."""
    largest = _magnitudes(values).max() if values.numel() else values.new_zeros((), dtype=torch.int32)
    exponent = (141 - (largest >> 23)).clamp(-126, 126)
    exponent = torch.where((largest > 0) & (largest < INFINITY), exponent, 0)
    scale, inverse = (((127 + sign * exponent) << 23).int().view(torch.float32) for sign in (1, -1))
    return scale, inverse


def _quantise(values: Tensor, levels: int, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, the bits of a bfloat16 for each block as int16, and codes, int8 [n]."""
    count, blocks = values.numel(), -(-values.numel() // BLOCK)
    whole = torch.nn.functional.pad(values, (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    bits = _magnitudes(whole).amax(1, keepdim=True)
    largest = bits.view(torch.float32)
    rounded = ((largest / torch.full_like(largest, levels)).view(torch.int32) + 0xFFFF) >> 16
    rounded = rounded - ((rounded << 16).view(torch.float32) * levels).isinf().int()
    scale, strange = (rounded << 16).view(torch.float32), bits >= INFINITY
    waits = strange | ~(scale >= SMALLEST)  # its reciprocal would be infinite
    codes = (whole * (torch.ones_like(scale) / scale)).round().clamp(-levels, levels)
    codes = torch.where(waits, 0.0, codes)
    left = torch.where(strange, math.nan, whole - codes * torch.where(waits, 0.0, scale))
    rest.copy_(left.view(-1)[:count])
    return torch.where(strange, NOT_A_NUMBER, rounded).to(torch.int16).view(-1), codes.to(torch.int8).view(-1)[:count]


def _joined(codes: Tensor) -> Tensor:
    """Two codes of four bits to a byte, the first in its lower half."""
    even = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.uint8)
    return (even[::2] & 15) | (even[1::2] << 4)


def _split(joined: Tensor) -> Tensor:
    both = torch.stack([joined & 15, joined >> 4], dim=1).view(-1).to(torch.int8)
    return both - 16 * (both > 7).to(torch.int8)
