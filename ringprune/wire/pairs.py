"""How entries of a rank's own choice travel: indices as short as in an index message, and values, in one frame.

How many there are is told before, so that a message holds nothing but them.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringprune.wire.indices import IndexCode, index_code
from ringprune.wire.message import FRAME_BYTES, new_message, open_message, seal, whole_words
from ringprune.wire.values import ValueCode, value_code

__all__ = ["PairCode", "pair_code"]

PAIRS = 32
"""Added to the number of the format of the indices: the number of the format of pairs."""

Indices = NDArray[np.int32]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class PairCode:
    """How pairs of an index and a value travel; equal on every rank. Made by :func:`pair_code`.

    Attributes:
        indices: how the indices do; its ``count`` is how many pairs are expected, messages may hold more or fewer.
        values: how the values do where it makes a message shorter; None is float32.
    """

    indices: IndexCode
    values: ValueCode | None

    def size(self, count: int) -> int:
        """Bytes of a message of ``count`` pairs; nothing is sent of none."""
        return FRAME_BYTES + self._of(count).position_bytes + self._value_bytes(count) if count else 0

    @property
    def index_share(self) -> float:
        """The share of the indices in the bytes of a message of the length expected."""
        count = max(1, self.indices.count)
        positions = self._of(count).position_bytes
        return positions / (positions + self._value_bytes(count))

    def encode(self, indices: Indices, values: Values, rest: Values) -> Tensor:
        """The message of some pairs.

        Args:
            indices: ascending, each once, below ``indices.numel`` of this code.
            values: one for each.
            rest: shape of ``values``; overwritten with what rounding drops.

        Returns:
            uint8, shape ``(size(n),)``, in CPU memory.
        """
        count = indices.size
        if not count:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        code = self._of(count)
        message = new_message(code.position_bytes + self._value_bytes(count))
        positions, body = self._parts(message, code)
        code.write(indices, positions.numpy().view(np.uint64))
        rounding = self._rounding(count)
        if rounding is None:
            rest.fill(0)
            body.numpy().view(np.float32)[:count] = values
        else:
            rounding.encode(torch.from_numpy(values), torch.from_numpy(rest), body)
        return seal(message, PAIRS + code.number)

    def decode(self, message: Tensor, count: int, *, name: str) -> tuple[Indices, Values]:
        """The pairs of a message that came from another rank.

        Args:
            message: uint8.
            count: how many were told.
            name: what errors call the message.

        Raises:
            CommunicatorError: the message is truncated, damaged, foreign, or holds anything but ``count`` indices that
                ascend below ``indices.numel``, and their values.
        """
        if not count:
            return np.empty(0, np.int32), np.empty(0, np.float32)
        code, held = self._of(count), message.cpu()
        open_message(held, PAIRS + code.number, code.position_bytes + self._value_bytes(count), name=name)
        positions, body = self._parts(held, code)
        indices = code.read(positions.numpy().view(np.uint64), count, name=name)
        values = np.empty(count, np.float32)
        rounding = self._rounding(count)
        if rounding is None:
            values[:] = body.numpy().view(np.float32)[:count]
        else:
            rounding.decode(body, torch.from_numpy(values), name=name)
        return indices, values

    def _of(self, count: int) -> IndexCode:
        """The same format for so many."""
        return replace(self.indices, count=count)

    def _rounding(self, count: int) -> ValueCode | None:
        """How so many values travel; None as they are."""
        code = self.values
        return code if code is not None and code.size(count) < whole_words(4 * count) else None

    def _value_bytes(self, count: int) -> int:
        code = self._rounding(count)
        return whole_words(4 * count) if code is None else code.size(count)

    def _parts(self, message: Tensor, code: IndexCode) -> tuple[Tensor, Tensor]:
        """Positions and values of a message, each beginning on a word."""
        return message[FRAME_BYTES : FRAME_BYTES + code.position_bytes], message[FRAME_BYTES + code.position_bytes :]


def pair_code(count: int, numel: int, indices: str = "auto", values: str = "fp32") -> PairCode:
    """How pairs travel, about ``count`` in a message.

    Args:
        count: how many are expected.
        numel: indices are below.
        indices: one of :data:`ringprune.wire.INDEX_FORMATS`; ``"auto"`` is the shortest for ``count``.
        values: one of :data:`ringprune.wire.VALUE_FORMATS`.

    Raises:
        ConfigurationError: no such format.
    """
    return PairCode(index_code(count, numel, indices), value_code(values))
