"""Reads messages by docs/wire-format.md alone: written from that page, with nothing of the product."""

import zlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["index_bytes", "indices", "pairs", "values"]

VERSION = 4
LIST, BITMAP, ELIAS_FANO, PAIRS = 1, 2, 3, 32
BF16, FP16, INT8, INT4, BOOK4, BOOK2 = range(16, 22)

Array: TypeAlias = NDArray[Any]


def indices(message: bytes, count: int, numel: int) -> list[int]:
    """The positions of an index message that may hold ``count`` below ``numel``."""
    number, body = _opened(message)
    [kept] = np.frombuffer(body[:8], np.uint64).tolist()
    return _positions(number, body[8:], kept, count, numel, _width(count, numel))


def pairs(message: bytes, count: int, expected: int, numel: int) -> tuple[list[int], Array]:
    """Places and values of a message of ``count`` pairs, in the format for ``expected`` below ``numel``."""
    number, body = _opened(message)
    width = _width(expected, numel)
    end = _position_bytes(number - PAIRS, count, numel, width)
    places = _positions(number - PAIRS, body[:end], count, count, numel, width)
    if len(body) - end < _words(32 * count):
        return places, values(body[end:], count)
    found, nothing = _part(body[end:], np.float32, count)
    assert not nothing
    return places, found


def values(message: bytes, count: int) -> Array:
    """The values of a value message."""
    number, body = _opened(message)
    if number == BF16:
        codes, nothing = _part(body, np.uint16, count)
        found = _bfloat16(codes)
    elif number == FP16:
        scale, body = _part(body, np.float32, 1)
        codes, nothing = _part(body, np.float16, count)
        found = codes.astype(np.float32) * scale[0]
    elif number in (INT8, INT4):
        scales, body = _part(body, np.uint16, -(-count // 256))
        width, most = (8, 127) if number == INT8 else (4, 7)
        unsigned, nothing = _codes(body, width, count)
        signed = (unsigned ^ (1 << (width - 1))) - (1 << (width - 1))
        assert (np.abs(signed) <= most).all()
        found = signed.astype(np.float32) * np.repeat(_bfloat16(scales), 256)[:count]
    else:
        width = {BOOK4: 4, BOOK2: 2}[number]
        levels, body = _part(body, np.uint16, -(-count // 2048) << width)
        books = _bfloat16(levels).reshape(-1, 1 << width)
        assert (books[:, 1:] >= books[:, :-1]).all()
        unsigned, nothing = _codes(body, width, count)
        found = books[np.arange(count) // 2048, unsigned]
    assert not nothing
    return found


def index_bytes(count: int, numel: int) -> dict[int, int]:
    """Bytes of an index message in each format, by its number; frame and number of positions included."""
    width = _width(count, numel)
    return {number: 16 + _position_bytes(number, count, numel, width) for number in (LIST, BITMAP, ELIAS_FANO)}


def _opened(message: bytes) -> tuple[int, bytes]:
    """The number of the format, and the body."""
    assert (message[0], message[1], message[3]) == (82, VERSION, 0)
    assert int.from_bytes(message[4:8], "little") == zlib.crc32(message[:4] + message[8:])
    return message[2], message[8:]


def _words(bits: int) -> int:
    """Bytes of so many bits in whole words: W."""
    return 8 * -(-bits // 64)


def _part(body: bytes, dtype: DTypeLike, count: int) -> tuple[Array, bytes]:
    """The numbers that a body begins with, filled up with zeros to whole words; and what follows."""
    size = np.dtype(dtype).itemsize * count
    end = _words(8 * size)
    assert end <= len(body) and not any(body[size:end])
    return np.frombuffer(body[:size], dtype), body[end:]


def _codes(body: bytes, width: int, count: int) -> tuple[Array, bytes]:
    """Codes of so many bits, the first in the lowest bits of a byte; and what follows."""
    packed, rest = _part(body, np.uint8, -(-width * count // 8))
    return _numbers(np.unpackbits(packed, bitorder="little"), width, count), rest


def _numbers(bits: Array, width: int, count: int) -> Array:
    """Numbers of so many bits, the lowest bit first; all other bits are zero."""
    used = bits[: count * width].astype(np.int64).reshape(count, width)
    assert not np.any(bits[count * width :])
    numbers: Array = (used << np.arange(width)).sum(axis=1)
    return numbers


def _bits(body: bytes) -> Array:
    """Bit ``i % 64`` of word ``i // 64``, for all i."""
    return (np.frombuffer(body, np.uint64)[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).reshape(-1)


def _bfloat16(codes: Array) -> Array:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _width(count: int, numel: int) -> int:
    """The number of low bits with the shortest Elias-Fano code, the smallest of several."""
    return min(range(32), key=lambda width: _position_bytes(ELIAS_FANO, count, numel, width))


def _position_bytes(number: int, count: int, numel: int, width: int) -> int:
    if number == LIST:
        return _words(32 * count)
    return _words(numel) if number == BITMAP else _words(count + (numel >> width) + 1) + _words(width * count)


def _positions(number: int, body: bytes, kept: int, count: int, numel: int, width: int) -> list[int]:
    assert number in (LIST, BITMAP, ELIAS_FANO) and len(body) == _position_bytes(number, count, numel, width)
    if number == LIST:
        entries = np.frombuffer(body, np.int32)
        assert not entries[kept:].any()
        return list(entries[:kept])
    if number == BITMAP:
        found = np.flatnonzero(_bits(body))
    else:
        end = _words(count + (numel >> width) + 1)
        places = np.flatnonzero(_bits(body[:end]))
        assert len(places) == kept
        found = (places - np.arange(kept) << width) + _numbers(_bits(body[end:]), width, kept)
    assert len(found) == kept
    return list(found)
