"""The checksum of messages: zlib's CRC-32, at the speed of memory where the compiled library has it."""

import ctypes
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringprune.ops.library import native_library

__all__ = ["crc32"]

FEWEST = 1 << 14
"""Bytes worth the call, which takes two microseconds; zlib's own has done as many meanwhile."""

Native: TypeAlias = tuple[Callable[[int], int], Callable[[int, int, int], int]]
"""How many of so many bytes the compiled library takes, and their checksum behind another, from an address on."""


def crc32(data: NDArray[np.uint8], before: int = 0) -> int:
    """CRC-32 (ISO 3309) of some bytes, as ``zlib.crc32`` has it.

    Args:
        data: uint8, one dimension, contiguous.
        before: of the bytes that come before them.

    Raises:
        ValueError: they do not lie side by side.
    """
    return checksum(data, before, _NATIVE if data.size >= FEWEST else None)


def checksum(data: NDArray[np.uint8], before: int, native: Native | None) -> int:
    """The same by ``native`` as far as it takes them, and the rest by zlib."""
    if native is not None and data.flags.c_contiguous:  # zlib refuses others
        takes, fold = native
        taken = takes(data.size)
        before = fold(before, data.ctypes.data, taken) if taken else before
        data = data[taken:]
    buffer: Any = data  # which its annotations do not say
    return zlib.crc32(buffer, before)


def bound(library: ctypes.CDLL) -> Native:
    """The functions of a compiled library; its own name for them is that of csrc/cpu/crc32.cpp."""
    takes, fold = library.ringprune_crc32_takes, library.ringprune_crc32
    takes.argtypes, takes.restype = [ctypes.c_int64], ctypes.c_int64
    fold.argtypes, fold.restype = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint32
    return takes, fold


_LIBRARY = native_library("ringprune_crc32")
_NATIVE = None if _LIBRARY is None else bound(_LIBRARY)
