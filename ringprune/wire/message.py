"""The frame of a coded message: which wire format it is in, and whether it arrived as it was sent."""

import numpy as np
import torch
from torch import Tensor

from ringprune import ops
from ringprune.errors import CommunicatorError

__all__ = ["FRAME_BYTES", "WIRE_VERSION", "new_message", "open_message", "seal", "whole_words"]

WIRE_VERSION = 4
"""Compared at the hand-shake, and stands in every frame: ranks of different versions refuse each other."""

FRAME_BYTES = 8
_MAGIC = 0x52


def whole_words(size: int) -> int:
    """``size`` bytes rounded up to 8: what follows another part of a message lies on a word of its own."""
    return -(-size // 8) * 8


def new_message(body_bytes: int) -> Tensor:
    """A message to be written: uint8, zeros, frame and body; the frame is filled in by :func:`seal`."""
    # By numpy: torch would wake its threads for it, and they go on spinning on the cores that are to fill the message.
    return torch.from_numpy(np.zeros(FRAME_BYTES + body_bytes, np.uint8))


def seal(message: Tensor, code: int) -> Tensor:
    """Write the frame of a message whose body is complete.

    Args:
        message: uint8 in CPU memory, from :func:`new_message`; changed.
        code: number of the body's format, 0 to 255 (docs/wire-format.md).
    """
    frame = message.numpy()
    frame[:4] = (_MAGIC, WIRE_VERSION, code, 0)
    frame[4:FRAME_BYTES].view("<u4")[0] = _checksum(message)
    return message


def open_message(message: Tensor, code: int, body_bytes: int, *, name: str) -> Tensor:
    """The body of a message that came from another rank, checked.

    Args:
        message: uint8 in CPU memory.
        code: the format expected.
        body_bytes: the length expected.
        name: what errors call the message.

    Raises:
        CommunicatorError: it is truncated, damaged, foreign, or of another wire format.
    """
    frame, wanted = message.numpy(), FRAME_BYTES + body_bytes
    if frame.size != wanted:
        raise _refused(name, f"it has {frame.size} bytes instead of {wanted}")
    if frame[0] != _MAGIC:
        raise _refused(name, "it is no message of RingPrune's")
    if frame[1] != WIRE_VERSION:
        raise _refused(name, f"it is in wire format {frame[1]}")
    if frame[2] != code or frame[3]:
        raise _refused(name, f"its body is coded as number {frame[2]} instead of {code}")
    if int(frame[4:FRAME_BYTES].view("<u4")[0]) != _checksum(message):
        raise _refused(name, "its checksum does not fit")
    return message[FRAME_BYTES:]


def _checksum(message: Tensor) -> int:
    frame = message.numpy()
    return ops.crc32(frame[FRAME_BYTES:], ops.crc32(frame[:4]))


def _refused(name: str, why: str) -> CommunicatorError:
    return CommunicatorError(
        f"{name}: {why}; are all ranks running the same version of RingPrune (wire format {WIRE_VERSION})?"
    )
