"""How a set of rows of a table looks on the wire: int32 numbers, or one bit for each row of the table."""

import torch
from torch import Tensor

from ringprune.errors import CommunicatorError

__all__ = ["decode_rows", "encode_rows", "set_words"]

WORD = 64
"""Bit maps are in whole words of so many bits, two words of 32."""


def set_words(count: int, length: int) -> int:
    """Words of 32 bits of a set of ``count`` among ``length`` rows: as a list or as a bit map, whichever is shorter.

    A set of no rows takes none.
    """
    return min(count, 2 * -(-length // WORD))


def encode_rows(rows: Tensor, length: int) -> Tensor:
    """The message of a set.

    Args:
        rows: int64, shape ``(count,)``, ascending, in ``[0, length)``.
        length: rows of the table.

    Returns:
        int32, shape ``(set_words(count, length),)``, on the same device.
    """
    words = set_words(rows.numel(), length)
    if words == rows.numel():
        return rows.to(torch.int32)
    bits = torch.zeros(words, 32, dtype=torch.int32, device=rows.device)
    bits.view(-1)[rows] = 1
    # No bit is in two of the terms, so the sum is their union; that of 64 bits ends in the 32 wanted.
    return (bits.long() << torch.arange(32, device=rows.device)).sum(1).to(torch.int32)


def decode_rows(message: Tensor, count: int, length: int, name: str) -> Tensor:
    """The set of a message that came from another rank.

    Args:
        message: int32, shape ``(set_words(count, length),)``.
        count: rows that it should hold.
        length: rows of the table.
        name: what errors call it.

    Returns:
        int64, shape ``(count,)``, ascending.

    Raises:
        CommunicatorError: it holds no such set.
    """
    if message.numel() == count:
        rows = message.long()
        sound = not count or (int(rows[0]) >= 0 and int(rows[-1]) < length and bool((rows[1:] > rows[:-1]).all()))
    else:
        bits = (message.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=message.device)) & 1
        rows = bits.view(-1).nonzero().flatten()
        sound = rows.numel() == count and int(rows[-1]) < length
    if not sound:
        raise CommunicatorError(
            f"{name}: not {count} ascending rows within 0 to {length - 1}; are all ranks running the same version of "
            "RingPrune?"
        )
    return rows
