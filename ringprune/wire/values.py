"""How values travel where they are not float32: in 16, 8, 4 or 2 bits; what rounding drops is handed back.

Every format gives ``value = decoded + rest`` without error in float32, so that what is dropped can be kept and sent
later.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ringprune import ops
from ringprune.devices import to_device, to_host
from ringprune.threads import in_parts
from ringprune.validation import one_of
from ringprune.wire import on_device
from ringprune.wire.message import FRAME_BYTES, new_message, open_message, seal, whole_words
from ringprune.wire.quantise import BLOCK, dequantise, quantise
from ringprune.wire.sixteen import from_bfloat16, from_float16, largest_magnitude, to_bfloat16, to_float16

__all__ = ["VALUE_FORMATS", "ValueCode", "value_code"]

VALUE_FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "book4", "book2")

Array: TypeAlias = Any  # of numpy
Coding = Literal["bf16", "fp16", "int8", "int4", "book4", "book2"]
_CODES = {"bf16": 16, "fp16": 17, "int8": 18, "int4": 19, "book4": 20, "book2": 21}
_BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "book4": 4, "book2": 2}
_LEVELS = on_device.LEVELS
_BOOKS = {"book4": 16, "book2": 4}
_FP16_TOP = 15  # values are scaled so that the largest lies in [2^14, 2^15]: far from overflow, far from denormals


@dataclass(frozen=True)
class ValueCode:
    """A format of float32 values on the wire. Made by :func:`value_code`.

    Attributes:
        coding: its name. ``bf16`` rounds; ``fp16`` too, after a scaling by a power of two, the same for a message;
            ``int8`` and ``int4`` have one scale for every 256 values; ``book4`` and ``book2`` a book of 16 or 4
            levels, fitted to their distribution, for every 2048.
    """

    coding: Coding

    def size(self, count: int) -> int:
        """Bytes of a message of ``count`` values, its frame included."""
        return FRAME_BYTES + self._scale_bytes(count) + self._code_bytes(count)

    def encode(self, values: Tensor, rest: Tensor, message: Tensor | None = None) -> Tensor:
        """The message of some values.

        Args:
            values: float32, shape ``(n,)``.
            rest: float32, shape ``(n,)``, on the same device, perhaps ``values`` itself; overwritten with what rounding
                drops.
            message: where to write it: zeros, uint8, shape ``(size(n),)``, in CPU memory, at a multiple of 8 bytes;
                None makes it.

        Returns:
            The message, in CPU memory.
        """
        if message is None:
            message = new_message(self.size(values.numel()) - FRAME_BYTES)
        body = message[FRAME_BYTES:]
        # Coded where the values are: from a device only what is sent comes to the host.
        made = body if values.device.type == "cpu" else torch.zeros_like(body, device=values.device)
        self._write(values.detach(), rest, made)
        if made is not body:
            body.copy_(made)
        return seal(message, _CODES[self.coding])

    def _write(self, values: Tensor, rest: Tensor, body: Tensor) -> None:
        """The body, all of it on one device."""
        if self.coding in _BOOKS:
            ops.encode_books(values, rest, body, levels=_BOOKS[self.coding])
        elif values.device.type == "cpu":
            self._encode_on_host(values, rest, body)
        else:
            on_device.encode(self.coding, values, rest, *self._parts(body, values.numel()))

    def _encode_on_host(self, values: Tensor, rest: Tensor, body: Tensor) -> None:
        host, dropped = values.numpy(), rest.numpy()
        scales, codes = (part.numpy() for part in self._parts(body, host.size))
        if self.coding == "fp16":
            scales.view(np.float32)[0] = 1 / _power_below(host)

        def work(begin: int, end: int) -> None:
            self._encode(host[begin:end], *self._share(scales, codes, begin, end), dropped[begin:end])

        in_parts(host.size, BLOCK, work)

    def decode(self, message: Tensor, into: Tensor, *, add: bool = False, name: str) -> Tensor:
        """The values of a message that came from another rank.

        Args:
            message: uint8.
            into: float32, shape ``(n,)`` for the n values expected; overwritten.
            add: add them to what is there instead.
            name: what errors call the message.

        Returns:
            ``into``.

        Raises:
            CommunicatorError: the message is truncated, damaged, foreign, or of another wire format; ``into`` is as it
                was.
        """
        size = self.size(into.numel()) - FRAME_BYTES
        body = open_message(to_host(message), _CODES[self.coding], size, name=name)
        self._read(to_device(body, into.device), into, add=add)
        return into

    def _read(self, body: Tensor, into: Tensor, *, add: bool) -> None:
        if self.coding in _BOOKS:
            ops.decode_books(body, into, levels=_BOOKS[self.coding], add=add)
        elif into.device.type == "cpu":
            self._decode_on_host(body, into, add=add)
        else:
            values = on_device.decoded(self.coding, *self._parts(body, into.numel()), into.numel())
            (into.add_ if add else into.copy_)(values)

    def _decode_on_host(self, body: Tensor, into: Tensor, *, add: bool) -> None:
        values = into.numpy()
        scales, codes = (part.numpy() for part in self._parts(body, values.size))

        def work(begin: int, end: int) -> None:
            self._decode(*self._share(scales, codes, begin, end), values[begin:end], adds=add)

        in_parts(values.size, BLOCK, work)

    def _encode(self, values: Array, scales: Array, codes: Array, rest: Array) -> None:
        """One thread's share: of ``codes`` just the bytes of its values."""
        if self.coding == "bf16":
            to_bfloat16(values, codes.view(np.uint16), rest)
        elif self.coding == "fp16":
            inverse = scales.view(np.float32)[0]
            to_float16(values, np.float32(1) / inverse, inverse, codes.view(np.uint16), rest)
        else:
            whole = codes.view(np.int8) if self.coding == "int8" else np.zeros(2 * codes.size, np.int8)
            quantise(values, _LEVELS[self.coding], scales.view(np.uint16), whole[: values.size], rest)
            if self.coding == "int4":
                np.bitwise_or(whole[::2].view(np.uint8) & 15, whole[1::2].view(np.uint8) << 4, out=codes)

    def _decode(self, scales: Array, codes: Array, values: Array, *, adds: bool) -> None:
        """The same of a message that came."""
        if self.coding == "bf16":
            from_bfloat16(codes.view(np.uint16), values, adds)
        elif self.coding == "fp16":
            from_float16(codes.view(np.uint16), scales.view(np.float32)[0], values, adds)
        else:
            signed = codes.view(np.int8)
            whole = signed if self.coding == "int8" else np.stack([(signed << 4) >> 4, signed >> 4], axis=1).reshape(-1)
            dequantise(scales.view(np.uint16), whole[: values.size], values, adds)

    def _share(self, scales: Array, codes: Array, begin: int, end: int) -> tuple[Array, Array]:
        """Scales and codes of values ``[begin, end)``, which begin where a scale does."""
        bits = _BITS[self.coding]
        part = codes[begin * bits // 8 : -(-end * bits // 8)]
        return (scales[2 * (begin // BLOCK) : 2 * -(-end // BLOCK)] if self.coding in _LEVELS else scales), part

    def _parts(self, body: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scales and codes, each beginning on a word."""
        scale_bytes = self._scale_bytes(count)
        return body[:scale_bytes], body[scale_bytes:]

    def _scale_bytes(self, count: int) -> int:
        if self.coding in _LEVELS:
            return whole_words(2 * -(-count // BLOCK))
        if self.coding in _BOOKS:
            return ops.book_bytes(count, _BOOKS[self.coding])
        return whole_words(4) if self.coding == "fp16" else 0

    def _code_bytes(self, count: int) -> int:
        return whole_words(-(-count * _BITS[self.coding] // 8))


def value_code(name: str) -> ValueCode | None:
    """The format of that name, one of :data:`VALUE_FORMATS`; None for ``"fp32"``, which is no code.

    Raises:
        ConfigurationError: no such format.
    """
    one_of("values", name, VALUE_FORMATS)
    return None if name == "fp32" else ValueCode(name)  # type: ignore[arg-type]  # one_of has looked


def _power_below(values: Array) -> float:
    """The power of two that brings the largest of ``values`` into [2^14, 2^15); 1 where there is none to bring."""
    largest = np.uint32(largest_magnitude(values)).view(np.float32)
    if not np.isfinite(largest) or largest == 0:
        return 1.0
    exponent = _FP16_TOP - math.frexp(largest)[1]
    return float(2.0 ** max(-126, min(126, exponent)))
