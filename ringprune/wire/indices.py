"""How indices look on the wire (docs/wire-format.md): a plain list of int32 positions in the bucket, padded with -1."""

from torch import Tensor

from ringprune.errors import CommunicatorError
from ringprune.ops import MAX_POSITIONS, PAD

__all__ = ["MAX_POSITIONS", "WIRE_VERSION", "decode_indices"]

WIRE_VERSION = 2
"""Compared at the hand-shake: ranks of different versions refuse each other."""


def decode_indices(message: Tensor, numel: int, *, name: str) -> Tensor:
    """A proposal without its pads, checked.

    Args:
        message: int32, shape ``(k,)``, as :func:`ringprune.ops.select` makes it.
        numel: entries of the bucket.
        name: what errors call the message, with its sender.

    Returns:
        int32 positions, ascending; the message itself where it has no pads.

    Raises:
        CommunicatorError: a position is out of range or out of order. All ranks get the same message, so all raise.
    """
    if message.numel() and int(message.amin()) == PAD:
        message = message[message != PAD]
    if message.numel() and not bool((message[0] >= 0) & (message[-1] < numel) & (message[1:] > message[:-1]).all()):
        raise CommunicatorError(
            f"{name}: the indices proposed are not ascending positions below {numel}; are all ranks running the same "
            f"version of RingPrune (wire format {WIRE_VERSION})?"
        )
    return message
