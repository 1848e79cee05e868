"""How a proposal's indices travel: a list, a bit map or an Elias-Fano code, whichever is the shortest.

The size of each depends only on how many positions there may be and on the size of the bucket, which every rank knows:
so that all ranks choose alike, and nobody has to be told a size.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringprune.bitmap import count_bits, read_bitmap, set_bits
from ringprune.devices import to_device, to_host
from ringprune.errors import CommunicatorError
from ringprune.ops import MAX_POSITIONS, PAD
from ringprune.threads import in_parts
from ringprune.validation import one_of
from ringprune.wire import map_on_device
from ringprune.wire.elias_fano import fill_elias_fano, read_elias_fano
from ringprune.wire.message import FRAME_BYTES, WIRE_VERSION, new_message, open_message, seal

__all__ = ["INDEX_FORMATS", "MAX_POSITIONS", "IndexCode", "index_code"]

INDEX_FORMATS = ("auto", "list", "bitmap", "elias-fano")
"""``auto`` is the shortest of the others."""

BLOCK = 1 << 18
"""Entries of a map that a thread reads at least: it has to be told how many bits come before."""

LAST = np.iinfo(np.int32).max
_COUNT_BYTES = 8
_CODES = {"list": 1, "bitmap": 2, "elias-fano": 3}
Coding = Literal["list", "bitmap", "elias-fano"]


@dataclass(frozen=True)
class IndexCode:
    """How the proposals of one bucket at one density travel; equal on every rank. Made by :func:`index_code`.

    Attributes:
        coding: the format.
        count: most positions that a proposal may have.
        numel: entries of the bucket.
        width: low bits of a position that Elias-Fano writes as they are.
    """

    coding: Coding
    count: int
    numel: int
    width: int = 0

    @property
    def size(self) -> int:
        """Bytes of a message, its frame included."""
        return FRAME_BYTES + _COUNT_BYTES + self.position_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions alone: a multiple of 8."""
        return 8 * (self._first_words + self._second_words)

    @property
    def _first_words(self) -> int:
        """Words of the positions, of the bit map, or of Elias and Fano's unary part."""
        bits = {
            "list": 32 * self.count,
            "bitmap": self.numel,
            "elias-fano": self.count + (self.numel >> self.width) + 1,
        }
        return -(-bits[self.coding] // 64)

    @property
    def _second_words(self) -> int:
        return -(-self.count * self.width // 64)

    def encode(self, positions: Tensor) -> Tensor:
        """The message of a proposal.

        Args:
            positions: int32, at most ``count``, ascending and below ``numel`` but for places that hold ``PAD``, as
                :func:`ringprune.ops.select` gives them.

        Returns:
            uint8, shape ``(size,)``, in host memory.
        """
        if self.coding == "bitmap" and _codes_itself(positions.device):
            # Made where the positions are: of entries so close, a bit for each is far less than an int32 for each.
            made = torch.zeros(self.size, dtype=torch.uint8, device=positions.device)
            map_on_device.write(positions, made[FRAME_BYTES:])
            return seal(to_host(made), self.number)
        host = to_host(positions).numpy()
        kept = host[host != PAD] if host.size and host.min() == PAD else host
        message = new_message(_COUNT_BYTES + self.position_bytes)
        words = message.numpy()[FRAME_BYTES:].view(np.uint64)
        words[0] = kept.size
        self.write(kept, words[1:])
        return seal(message, self.number)

    @property
    def number(self) -> int:
        """The format's number in a frame."""
        return _CODES[self.coding]

    def write(self, positions: NDArray[np.int32], words: NDArray[np.uint64]) -> None:
        """Write at most ``count`` positions, ascending, into zeros: ``position_bytes`` of them."""
        first, second = words[: self._first_words], words[self._first_words :]
        if self.coding == "list":
            first.view(np.int32)[: positions.size] = positions
        elif self.coding == "bitmap":
            _write_map(positions, first)
        else:
            fill_elias_fano(positions, self.width, first, second)

    def decode(self, message: Tensor, *, name: str) -> Tensor:
        """The positions of a proposal that another rank sent.

        Args:
            message: uint8.
            name: what errors call it: bucket, step, root.

        Returns:
            int32, ascending, each position once, all below ``numel``; in host memory.

        Raises:
            CommunicatorError: the message is damaged, foreign or of another version, or holds anything but that. All
                ranks get the same message, so all raise.
        """
        body, kept = self._opened(message, name=name)
        return torch.from_numpy(self.read(body.numpy().view(np.uint64), kept, name=name))

    def decode_maps(self, messages: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The positions of one or several proposals together, in bit maps; nothing waits for the device.

        The host looks at the maps, whatever the device: so all ranks refuse the same ones.

        Args:
            messages: uint8, by what errors call them; at least one.
            device: where to make the positions.

        Returns:
            int32, ascending, each position once, all below ``numel``; on ``device``.

        Raises:
            CommunicatorError: the first message of which :meth:`decode` would say so.
        """
        maps, step = [], map_on_device.PART if _codes_itself(device) else BLOCK
        for name, message in messages.items():
            bits, kept = self._opened(message, name=name)
            words = bits.numpy().view(np.uint64)
            beyond = self.numel % 64 and int(words[-1]) >> self.numel % 64
            counts = _counts(bits, step)
            if beyond or sum(counts) != kept:
                raise self._unlawful(name)
            maps.append(bits)
        if len(maps) > 1:
            bits = torch.from_numpy(functools.reduce(np.bitwise_or, (bits.numpy() for bits in maps)))
            counts = _counts(bits, step)
        return _read_map(bits, counts, step, device)

    def _opened(self, message: Tensor, *, name: str) -> tuple[Tensor, int]:
        """The bytes of a proposal's positions, as they came, and how many it says they are: at most ``count``."""
        body = open_message(message.cpu(), self.number, _COUNT_BYTES + self.position_bytes, name=name)
        kept = int(body[:_COUNT_BYTES].numpy().view(np.uint64)[0])
        if kept > self.count:
            raise CommunicatorError(f"{name}: {kept} indices, more than the {self.count} agreed")
        return body[_COUNT_BYTES:], kept

    def _unlawful(self, name: str) -> CommunicatorError:
        return CommunicatorError(
            f"{name}: the indices proposed are not ascending positions below {self.numel}; are all ranks running "
            f"the same version of RingPrune (wire format {WIRE_VERSION})?"
        )

    def read(self, words: NDArray[np.uint64], kept: int, *, name: str) -> NDArray[np.int32]:
        """The ``kept`` positions, at most ``count``, that :meth:`write` has written.

        Raises:
            CommunicatorError: they are anything but ``kept`` ascending positions below ``numel``.
        """
        positions = np.empty(kept, np.int32)
        first, second = words[: self._first_words], words[self._first_words :]
        if self.coding == "list":
            listed = first.view(np.int32)
            positions[:] = listed[:kept]
            lawful = not listed[kept:].any() and (
                kept == 0
                or bool((positions[0] >= 0) & (positions[-1] < self.numel) & (positions[1:] > positions[:-1]).all())
            )
        elif self.coding == "bitmap":
            lawful = read_bitmap(first, self.numel, positions)
        else:
            lawful = read_elias_fano(first, second, self.width, self.numel, positions)
        if not lawful:
            raise self._unlawful(name)
        return positions


def _codes_itself(device: torch.device) -> bool:
    """Whether maps are made and read by operations of the device, not by loops on the host."""
    return device.type != "cpu"


def _counts(bits: Tensor, step: int) -> list[int]:
    """How many bits of a map, uint8, are set in each ``step`` entries."""
    words = bits.numpy().view(np.uint64)
    return [int(count_bits(words[begin : begin + step // 64])) for begin in range(0, words.size, step // 64)]


def _read_map(bits: Tensor, counts: list[int], step: int, device: torch.device) -> Tensor:
    """The positions of a map, int32, on a device.

    Args:
        bits: uint8, the map's bytes; of a message a slice, not by way of numpy (:func:`ringprune.devices.to_device`).
        counts: how many are set in each ``step`` entries.
        step: on a device :data:`ringprune.wire.map_on_device.PART`.
        device: where to make the positions.
    """
    if _codes_itself(device):
        return map_on_device.read(to_device(bits, device), counts)
    words = bits.numpy().view(np.uint64)
    starts = [0, *itertools.accumulate(counts)]
    positions = np.empty(starts[-1], np.int32)

    def read(begin: int, end: int) -> None:
        into = positions[starts[begin // step] : starts[-(-end // step)]]
        read_bitmap(words[begin // 64 : end // 64], 64 * words.size, into, begin)

    in_parts(64 * words.size, step, read)
    return torch.from_numpy(positions)


def _write_map(positions: NDArray[np.int32], words: NDArray[np.uint64]) -> None:
    """Set the bits at positions that ascend, on several threads, of which each has words of its own."""

    def write(begin: int, end: int) -> None:
        # As what they are compared with: of another type all of them would be copied first.
        ends = [
            positions.size if place > LAST else np.searchsorted(positions, np.int32(place)) for place in (begin, end)
        ]
        set_bits(positions[slice(*ends)], words)

    in_parts(64 * words.size, 64, write)


@functools.lru_cache(maxsize=1024)
def index_code(count: int, numel: int, coding: str = "auto") -> IndexCode:
    """How at most ``count`` of ``numel`` positions travel.

    Elias-Fano (P. Elias, J. ACM 21, 1974; R. Fano, MIT memorandum 61, 1971) takes within half a bit per position of
    what any code needs for positions anywhere, about ``2 + log2(numel / count)`` bits.

    Args:
        count: most positions of a proposal.
        numel: entries of the bucket.
        coding: one of :data:`INDEX_FORMATS`.

    Raises:
        ConfigurationError: no such format.
    """
    one_of("index_format", coding, INDEX_FORMATS)
    # The best width lies beside log2(numel / count): the unary part then takes one to two bits per position.
    widest = max(0, (numel // max(count, 1)).bit_length())
    split = min((IndexCode("elias-fano", count, numel, w) for w in range(widest + 1)), key=lambda code: code.size)
    codes = [IndexCode("list", count, numel), IndexCode("bitmap", count, numel), split]
    if coding == "auto":
        return min(codes, key=lambda code: code.size)
    return next(code for code in codes if code.coding == coding)
