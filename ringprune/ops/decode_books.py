"""The values of a message that :func:`~ringprune.ops.encode_books` made on another rank."""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ringprune.compiled import compiled, float_of
from ringprune.ops.checks import check_flat, check_overlap
from ringprune.ops.encode_books import BLOCK, by_parts, check_address, check_body
from ringprune.ops.library import call, define

__all__ = ["decode_books"]

SCHEMA = "decode_books(Tensor body, Tensor(a!) values, *, int levels, bool add) -> ()"

Array: TypeAlias = Any  # of numpy


def decode_books(body: Tensor, values: Tensor, *, levels: int, add: bool) -> None:
    """Write the level of each code into ``values``, or add it.

    Args:
        body: uint8, as ``encode_books`` makes it; any bytes decode to something.
        values: float32 [n]; overwritten, or added to.
        levels: of a book, 16 or 4.
        add: add to what is there.

    Raises:
        ConfigurationError: a size, an address or a device does not fit, or ``values`` lie in ``body``.
        ArgumentTypeError: a dtype does not fit.
    """
    call(_decode_books, body, values, levels=levels, add=add)


def check_decode_books(body: Tensor, values: Tensor, *, levels: int, add: bool) -> None:
    """Refuse arguments of :func:`decode_books` that do not fit."""
    check_flat("decode_books", "values", values, torch.float32)
    check_body("decode_books", body, values, levels)


def decode_books_reference(body: Tensor, values: Tensor, *, levels: int, add: bool) -> None:
    """:func:`decode_books` by numba, on the host."""
    check_address("decode_books", body)
    check_overlap("decode_books", "values", values, "body", body)
    there = values.detach().cpu()
    into = there.numpy()

    def work(books: Array, codes: Array, part: slice) -> None:
        _decode(books, codes, into[part], add)

    by_parts(body.cpu(), values.numel(), levels, work)
    if values.device.type != "cpu":
        values.copy_(there)


@compiled
def _decode(books: Array, codes: Array, values: Array, add: bool) -> None:
    """All blocks; ``books`` of shape ``(blocks, levels)``."""
    levels = np.empty(books.shape[1], np.float32)
    for block in range(books.shape[0]):
        for j in range(levels.size):
            levels[j] = float_of(np.uint32(books[block, j]) << np.uint32(16))
        part = values[block * BLOCK : block * BLOCK + BLOCK]
        if levels.size == 16:
            for i in range(part.size):
                code = codes[(block * BLOCK + i) >> 1] >> np.uint8((i & 1) << 2) & np.uint8(15)
                part[i] = part[i] + levels[code] if add else levels[code]
        else:
            for i in range(part.size):
                code = codes[(block * BLOCK + i) >> 2] >> np.uint8((i & 3) << 1) & np.uint8(3)
                part[i] = part[i] + levels[code] if add else levels[code]


def _decode_books_fake(body: Tensor, values: Tensor, *, levels: int, add: bool) -> None:
    return None


_decode_books = define(SCHEMA, check_decode_books, decode_books_reference, _decode_books_fake)
