"""Bit maps of positions, made and read by operations of torch: where positions are on a device, only bits leave it.

Bytes and positions are those of :mod:`ringprune.bitmap`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.ops import PAD

__all__ = ["PART", "read", "write"]

PART = 1 << 23
"""Entries, or positions, looked at at once: a whole number of words. Their int64 take memory only for so many."""

JOINING = sum(1 << (56 - 7 * place) for place in range(8))
"""Times a word of eight bytes, each 0 or 1: its last byte then holds them as bits, the first byte's the lowest."""


def write(positions: Tensor, into: Tensor) -> None:
    """Write how many positions there are, and their map.

    Args:
        positions: int32, ascending but for places that hold ``PAD``, others below 8 times the bytes of the map.
        into: uint8, zeros, on the same device, from a multiple of 8 bytes on: 8 for the number, and the map's.
    """
    into[:8].view(torch.int64).copy_((positions != PAD).sum())
    # A byte for each entry, and one more, the last, which is where PAD counts as -1 from the end.
    marks = torch.zeros(8 * (into.numel() - 8) + 1, dtype=torch.uint8, device=positions.device)
    for part in positions.split(PART):
        marks.index_fill_(0, part.long(), 1)
    marks[:-1].view(torch.int64).mul_(JOINING)
    into[8:] = marks[7:-1:8]


def read(bits: Tensor, counts: Sequence[int]) -> Tensor:
    """The positions of a map; nothing waits for the device.

    Args:
        bits: uint8, the map's bytes.
        counts: how many bits are set in each ``PART`` of it.

    Returns:
        int32, ascending, on the device of ``bits``.
    """
    positions = torch.empty(sum(counts), dtype=torch.int32, device=bits.device)
    each = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    for number, (part, out) in enumerate(zip(bits.split(PART // 8), positions.split(list(counts)), strict=False)):
        # Of a size that is known: torch.nonzero would wait to learn it.
        found = torch.nonzero_static((part.unsqueeze(1) & each).view(-1), size=out.numel())
        torch.add(found.view(-1), number * PART, out=out)
    return positions
