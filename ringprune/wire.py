"""How indices look on the wire (docs/wire-format.md): a plain list of int32 positions in the bucket."""

import torch
from torch import Tensor

from ringprune.errors import CommunicatorError

__all__ = ["MAX_POSITIONS", "WIRE_VERSION", "decode_indices", "encode_indices"]

WIRE_VERSION = 1
"""Compared at the hand-shake: ranks of different versions refuse each other."""

MAX_POSITIONS = 2**31 - 1
"""Entries of the largest bucket whose positions fit int32."""


def encode_indices(indices: Tensor) -> Tensor:
    """int64 positions to int32, 4 bytes each."""
    return indices.to(torch.int32)


def decode_indices(message: Tensor, numel: int, *, name: str) -> Tensor:
    """int32 positions to int64, checked.

    Args:
        message: int32, shape ``(k,)``.
        numel: entries of the bucket.
        name: what errors call the message, with its sender.

    Raises:
        CommunicatorError: a position is out of range or out of order. All ranks get the same message, so all raise.
    """
    indices = message.to(torch.int64)
    if indices.numel() and not bool((indices[0] >= 0) & (indices[-1] < numel) & (indices[1:] > indices[:-1]).all()):
        raise CommunicatorError(
            f"{name}: the indices proposed are not ascending positions below {numel}; are all ranks running the same "
            f"version of RingPrune (wire format {WIRE_VERSION})?"
        )
    return indices
