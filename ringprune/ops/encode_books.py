"""Code values by books of levels, fitted to each block of them: how they travel in 4 or 2 bits.

A book is fitted as by S. Lloyd, "Least squares quantization in PCM", IEEE Trans. Information Theory 28 (1982), on a
histogram whose bins are the numbers that agree in their leading bits: 16 bins for each power of two, so that any
distribution is resolved, and the bin of a value costs a shift. It begins with the levels that are best where there are
many: as dense as the cube root of the distribution (P. Panter, W. Dite, Proc. IRE 39, 1951).

The reference is compiled by numba, for it has loops that torch has no operation for; ``csrc/books.h`` is the same.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ringprune.compiled import bits_of, compiled, float_of
from ringprune.errors import ConfigurationError
from ringprune.ops.checks import check_flat, check_overlap
from ringprune.ops.library import call, define
from ringprune.threads import in_parts

__all__ = ["BLOCK", "book_body_bytes", "book_bytes", "by_parts", "check_address", "check_body", "encode_books"]

SCHEMA = "encode_books(Tensor values, Tensor(a!) rest, Tensor(b!) body, *, int levels) -> ()"

BLOCK = 2048
"""Values that share a book: 16 levels of 16 bits are 0.125 bits per value, 4 levels 0.03."""

ROUNDS = 6
"""Of moving each level to the mean of the values nearest to it; four are nearly always enough."""

Array: TypeAlias = Any  # of numpy; the dtypes stand in the docstrings
Number: TypeAlias = Any

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
NOT_A_NUMBER = np.uint16(0x7FC0)

SHIFT = np.uint32(19)  # leaves sign, exponent and 4 bits of the fraction
BELOW = np.uint32((1 << 19) - 1)
POWERS = 12  # values below about 2^-12 of the largest share one bin, and are zero to every book
HALF = 16 * POWERS  # bins of one sign
BINS = 2 * HALF + 1
ONE = np.int64(1 << 32)  # a bin holds 2^32 times its number of values, plus the sum of their lower bits
MOST_LEVELS = 16
TOO_SMALL, NOT_FINITE = np.int32(-1), np.int32(-2)

# Levels are fitted with the block's largest magnitude between 1 and 2.
SMALLEST_LEVEL = 2.0**-POWERS
LARGEST_LEVEL = np.uint32(0x3FFF0000)
POWER_OF_ONE = np.int32(127)

# With the block's largest magnitude between 1 and 2, all that are told apart from zero are multiples of this, so that
# sums of a block's values are exact.
UNIT = 2.0 ** -(POWERS + 23)

# Rows of the table of sums.
REACHED, COUNTED, SUMMED = range(3)


def _cube_root(x: Array) -> Array:
    """By Newton's method from far off: the same bits wherever doubles are IEEE's, which libraries' roots are not."""
    root = np.maximum(x, 1.0)
    for _ in range(40):
        root = (2 * root + x / (root * root)) / 3
    return np.where(x > 0, root, 0.0)


def _rounded(x: Array) -> Array:
    """Whole multiples of 2^-20: sums of them are exact."""
    return (x * (1 << 20) + 0.5).astype(np.int64)


def _roots_of_widths() -> Array:
    """The width of each bin to the power of 2/3, up to a factor."""
    edges = ((np.arange(HALF + 1, dtype=np.uint32) + np.uint32(127 << 4)) << SHIFT).view(np.float32).astype(np.float64)
    above = np.diff(edges)
    return _rounded(_cube_root(np.concatenate([above[::-1], [2 * edges[0]], above]) ** 2))


WIDTHS = _roots_of_widths()
ROOTS = _rounded(_cube_root(np.arange(BLOCK + 1, dtype=np.float64)))


def encode_books(values: Tensor, rest: Tensor, body: Tensor, *, levels: int) -> None:
    """Fit a book to each block of values, and round each value to one of its levels, nearly always to the nearest.

    ``value = level + rest`` without error: each value gets zero, or a level of its own sign that is at most twice as
    large and at least 2^-13 of it. Where the best levels leave a value without such a one, one of them becomes zero and
    the others are fitted again. Values below 2^-12 of the block's largest become zero. A block with NaN or infinity
    becomes NaN; of one that is all below 2^-103 nothing is sent.

    Args:
        values: float32 [n].
        rest: float32 [n]; overwritten with what rounding drops. May be ``values`` itself.
        body: uint8 [:func:`book_body_bytes` of n], beginning at a multiple of 8 bytes; overwritten with the books, the
            bits of bfloat16 levels, ascending, and behind them the codes: 4 or 2 bits for each value, the first in the
            lowest bits of a byte, then zeros.
        levels: of a book: 16, in 4 bits, or 4, in 2.

    Raises:
        ConfigurationError: a size, an address or a device does not fit, or what is written lies in other arguments.
        ArgumentTypeError: a dtype does not fit.
    """
    call(_encode_books, values, rest, body, levels=levels)


def bits_per_code(levels: int) -> int:
    """Bits of a code, where a book has so many levels."""
    return 4 if levels == MOST_LEVELS else 2


def book_bytes(count: int, levels: int) -> int:
    """Bytes of the books of ``count`` values."""
    return 2 * levels * -(-count // BLOCK)


def book_body_bytes(count: int, levels: int) -> int:
    """Bytes of books and codes of ``count`` values, in whole words of 8."""
    return book_bytes(count, levels) + 8 * -(-count * bits_per_code(levels) // 64)


def check_body(op: str, body: Tensor, values: Tensor, levels: int) -> None:
    """Refuse what is no body of a message of so many values."""
    if levels not in (4, MOST_LEVELS):
        raise ConfigurationError(f"{op}: levels is {levels}; 4 or 16 is needed")
    check_flat(op, "body", body, torch.uint8, device=values.device, numel=book_body_bytes(values.numel(), levels))


def check_address(op: str, body: Tensor) -> None:
    """Refuse a body that begins within a word. For the references only."""
    if body.numel() and body.data_ptr() % 8:
        raise ConfigurationError(f"{op}: body does not begin at a multiple of 8 bytes")


def by_parts(body: Tensor, count: int, levels: int, work: Callable[..., None]) -> None:
    """Call ``work(books, codes, values)`` for parts of a body in CPU memory, the last a slice; side by side."""
    bits, end_of_books = bits_per_code(levels), book_bytes(count, levels)
    books, codes = body.numpy()[:end_of_books].view(np.uint16).reshape(-1, levels), body.numpy()[end_of_books:]

    def part(begin: int, end: int) -> None:
        here = codes[begin * bits // 8 : -(-end * bits // 8)]
        work(books[begin // BLOCK : -(-end // BLOCK)], here, slice(begin, end))

    in_parts(count, BLOCK, part)


def check_encode_books(values: Tensor, rest: Tensor, body: Tensor, *, levels: int) -> None:
    """Refuse arguments of :func:`encode_books` that do not fit."""
    check_flat("encode_books", "values", values, torch.float32)
    check_flat("encode_books", "rest", rest, torch.float32, device=values.device, numel=values.numel())
    check_body("encode_books", body, values, levels)


def encode_books_reference(values: Tensor, rest: Tensor, body: Tensor, *, levels: int) -> None:
    """:func:`encode_books` by numba, on the host."""
    check_address("encode_books", body)
    if rest.data_ptr() != values.data_ptr():
        check_overlap("encode_books", "rest", rest, "values", values)
    check_overlap("encode_books", "body", body, "values", values)
    check_overlap("encode_books", "body", body, "rest", rest)
    host = [tensor.detach().cpu() for tensor in (values, rest, body)]
    host[2].zero_()
    from_, dropped = host[0].numpy(), host[1].numpy()

    def work(books: Array, codes: Array, part: slice) -> None:
        _encode(from_[part], books, codes, dropped[part])

    by_parts(host[2], values.numel(), levels, work)
    for tensor, made in ((rest, host[1]), (body, host[2])):
        if tensor.device.type != "cpu":
            tensor.copy_(made)


@compiled
def _encode(values: Array, books: Array, codes: Array, rest: Array) -> None:
    """All blocks; ``books`` of shape ``(blocks, levels)``, ``codes`` zeros."""
    bins, levels = np.empty(BLOCK, np.uint32), np.empty(books.shape[1])
    table, means, histogram = np.empty((3, BINS + 1), np.int64), np.empty(BINS), np.empty(BINS, np.int64)
    code_of, level_of = np.zeros(BINS + 1, np.uint8), np.empty(BINS, np.float32)
    per_byte = 2 if books.shape[1] == 16 else 4
    for block in range(books.shape[0]):
        begin, end = block * BLOCK, min(block * BLOCK + BLOCK, values.size)
        part, left = values[begin:end], rest[begin:end]
        into = codes[begin // per_byte : -(-end // per_byte)]
        base = _sort_into_bins(part, bins, histogram)
        if base < 0:
            books[block] = NOT_A_NUMBER if base == NOT_FINITE else np.uint16(0)
            for i in range(part.size):
                left[i] = np.float32(np.nan) if base == NOT_FINITE else part[i]
        else:
            _resolve(histogram, base, table, means)
            _fit(table, means, base, levels, books[block], code_of, level_of)
            for i in range(part.size):
                left[i] = part[i] - level_of[bins[i]]
            _join(bins, code_of, per_byte, into)


@compiled
def _sort_into_bins(values: Array, bins: Array, histogram: Array) -> Number:
    """Sort by leading bits.

    Args:
        values: float32, shape ``(n,)``.
        bins: uint32; overwritten with the bin of each value, from the most negative one up; ``HALF`` is that of zero,
            ``BINS`` stands behind the last value.
        histogram: int64; overwritten with what is in each bin, see ``ONE``.

    Returns:
        The leading bits of the largest magnitude in the bin of zero; ``TOO_SMALL`` and ``NOT_FINITE``: it was not done.
    """
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, bits_of(values[i]) & MAGNITUDE)
    base = np.int32(largest >> SHIFT) - np.int32(HALF)
    if largest >= INFINITY:
        return NOT_FINITE
    if base < HALF:
        return TOO_SMALL
    for i in range(values.size):
        bits = bits_of(values[i])
        above = max(np.int32((bits & MAGNITUDE) >> SHIFT) - base, np.int32(0))
        bins[i] = np.int32(HALF) + (above if bits < SIGN else -above)
    bins[values.size :] = BINS
    histogram[:] = 0
    for i in range(values.size):
        histogram[bins[i]] += ONE + np.int64(bits_of(values[i]) & BELOW)
    return base


@compiled
def _power(base: Number) -> Number:
    """The exponent of the block's largest magnitude, as float32 holds it, less that of 1."""
    return ((base + np.int32(HALF)) >> np.int32(4)) - POWER_OF_ONE


@compiled
def _leading(index: Number, base: Number) -> Number:
    """The leading bits of the smallest magnitude in a bin, with the block's largest between 1 and 2."""
    return base + np.int32(abs(index - HALF)) - (_power(base) << np.int32(4))


@compiled
def _edge(index: Number, base: Number) -> Number:
    return float_of(np.uint32(_leading(index, base)) << SHIFT)


@compiled
def _resolve(histogram: Array, base: Number, table: Array, means: Array) -> None:
    """Of each bin: the mean of its values, and roots of the density up to it; count and sum of all that is below."""
    counted, summed, reached = np.int64(0), np.int64(0), np.int64(0)
    for b in range(BINS):
        count, total, leading = histogram[b] >> np.int64(32), np.int64(0), np.int64(_leading(b, base))
        table[COUNTED, b], table[SUMMED, b], means[b] = counted, summed, 0.0
        if count and b != HALF:
            of_one = (np.int64(16) + (leading & np.int64(15))) << np.int64(SHIFT)
            total = count * of_one + (histogram[b] & np.int64(0xFFFFFFFF))
            total = total << ((leading >> np.int64(4)) - np.int64(POWER_OF_ONE) + np.int64(POWERS))
            total = total if b > HALF else -total
            means[b] = total * UNIT / count
        counted += count
        summed += total
        reached += ROOTS[count] * WIDTHS[b]
        table[REACHED, b] = reached
    table[COUNTED, BINS], table[SUMMED, BINS] = counted, summed


@compiled
def _fit(table: Array, means: Array, base: Number, levels: Array, book: Array, code_of: Array, level_of: Array) -> None:
    """The book of a block, and for each bin the code and the level that its values get."""
    exact = False
    _begin(table, means, levels)
    if table[COUNTED, HALF + 1] == table[COUNTED, HALF]:  # no value is near zero, so that all levels may be elsewhere
        _improve(table, means, base, levels, -1)
        exact = _assign(table, means, base, levels, code_of, level_of)
    if not exact:
        zero = 0
        for j in range(levels.size):  # of several alike the innermost, so that levels stay ascending
            if abs(levels[j]) < abs(levels[zero]) or levels[j] == levels[zero] < 0:
                zero = j
        levels[zero] = 0.0
        _improve(table, means, base, levels, zero)
        _assign(table, means, base, levels, code_of, level_of)
    power = _power(base)
    for j in range(levels.size):
        bits = bits_of(np.float32(levels[j])) >> np.uint32(16)
        book[j] = bits + np.uint32(power << np.int32(7)) if levels[j] != 0.0 else np.uint32(0)
    scale = float_of(np.uint32(power + POWER_OF_ONE) << np.uint32(23))
    for b in range(BINS):
        level_of[b] *= scale


@compiled
def _begin(table: Array, means: Array, levels: Array) -> None:
    """Levels that are as dense as the cube root of the distribution."""
    total, j = table[REACHED, BINS - 1], 0
    for b in range(BINS):
        while j < levels.size and 2 * levels.size * table[REACHED, b] >= (2 * j + 1) * total:
            levels[j] = means[b]
            j += 1


@compiled
def _improve(table: Array, means: Array, base: Number, levels: Array, zero: Number) -> None:
    """Move each level but ``zero`` to the mean of the values nearest to it, again and again; then round to bfloat16."""
    for _ in range(ROUNDS):
        counted, summed = np.int64(0), np.int64(0)
        for j in range(levels.size):
            end = BINS
            if j + 1 < levels.size:
                end = _bins_below(means, base, (levels[j] + levels[j + 1]) / 2)
            here, total = table[COUNTED, end] - counted, table[SUMMED, end] - summed
            if here > 0:
                counted, summed = counted + here, summed + total
                if j != zero:
                    levels[j] = total * UNIT / here
    for j in range(levels.size):
        bits = bits_of(np.float32(levels[j]))
        rounded = min((bits & MAGNITUDE) + np.uint32(0x8000), LARGEST_LEVEL) & np.uint32(0xFFFF0000)
        level = float_of(rounded) if float_of(rounded) >= SMALLEST_LEVEL else np.float32(0)
        levels[j] = level if bits < SIGN else -level


@compiled
def _bins_below(means: Array, base: Number, border: Number) -> Number:
    """How many bins have means below ``border``."""
    bits = bits_of(np.float32(border))
    above = np.int32((bits & MAGNITUDE) >> SHIFT) - base + (_power(base) << np.int32(4))
    above = min(max(above, np.int32(0)), np.int32(HALF))
    b = np.int32(HALF) + (above if bits < SIGN else -above)
    return b + 1 if means[b] < border else b


@compiled
def _assign(table: Array, means: Array, base: Number, levels: Array, code_of: Array, level_of: Array) -> bool:
    """For each bin the level nearest to its mean that leaves an exact rest, and its code; False where there is none."""
    nearest, last = 0, levels.size - 1
    for b in range(BINS):
        code_of[b], level_of[b] = 0, 0.0
        if table[COUNTED, b + 1] > table[COUNTED, b]:
            mean = means[b]
            while nearest < last and levels[nearest + 1] - mean < mean - levels[nearest]:
                nearest += 1
            most, j = 2 * _edge(b, base) if b != HALF else np.float32(0), nearest
            while j > 0 and levels[j] > most:
                j -= 1
            while j < last and levels[j] < -most:
                j += 1
            if levels[j] > most or levels[j] < -most or levels[j] * mean < 0:
                return False
            code_of[b], level_of[b] = j, levels[j]
    return True


@compiled
def _join(bins: Array, code_of: Array, per_byte: Number, codes: Array) -> None:
    """Several codes into each byte, the first in the lowest bits."""
    for i in range(codes.size):
        if per_byte == 2:
            codes[i] = code_of[bins[2 * i]] | code_of[bins[2 * i + 1]] << np.uint8(4)
        else:
            low = code_of[bins[4 * i]] | code_of[bins[4 * i + 1]] << np.uint8(2)
            high = code_of[bins[4 * i + 2]] | code_of[bins[4 * i + 3]] << np.uint8(2)
            codes[i] = low | high << np.uint8(4)


def _encode_books_fake(values: Tensor, rest: Tensor, body: Tensor, *, levels: int) -> None:
    return None


_encode_books = define(SCHEMA, check_encode_books, encode_books_reference, _encode_books_fake)
