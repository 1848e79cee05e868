"""How values travel where they are not float32: in 16, 8 or 4 bits; what rounding drops is handed back.

Every format gives ``value = decoded + rest`` without error in float32, so that what is dropped can be kept and sent
later.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ringprune.validation import one_of
from ringprune.wire.message import FRAME_BYTES, new_message, open_message, seal, whole_words
from ringprune.wire.quantise import BLOCK, dequantise, quantise

__all__ = ["VALUE_FORMATS", "ValueCode", "value_code"]

VALUE_FORMATS = ("fp32", "bf16", "fp16", "int8", "int4")

Coding = Literal["bf16", "fp16", "int8", "int4"]
_CODES = {"bf16": 16, "fp16": 17, "int8": 18, "int4": 19}
_BITS = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
_LEVELS = {"int8": 127, "int4": 7}
_LARGEST = float(torch.finfo(torch.bfloat16).max)
_FP16_TOP = 15  # values are scaled so that the largest lies in [2^14, 2^15]: far from overflow, far from denormals


@dataclass(frozen=True)
class ValueCode:
    """A format of float32 values on the wire. Made by :func:`value_code`.

    Attributes:
        coding: its name. ``bf16`` rounds; ``fp16`` too, after a scaling by a power of two, the same for a message;
            ``int8`` and ``int4`` have one scale for every 256 values.
    """

    coding: Coding

    def size(self, count: int) -> int:
        """Bytes of a message of ``count`` values, its frame included."""
        return FRAME_BYTES + self._scale_bytes(count) + self._code_bytes(count)

    def encode(self, values: Tensor, rest: Tensor) -> Tensor:
        """The message of some values.

        Args:
            values: float32, shape ``(n,)``.
            rest: float32, shape ``(n,)``, on the same device, perhaps ``values`` itself; overwritten with what rounding
                drops.

        Returns:
            uint8, shape ``(size(n),)``, on the device of ``values``.
        """
        count = values.numel()
        host, dropped = values.detach().cpu(), rest if rest.device.type == "cpu" else torch.empty(count)
        message = new_message(self.size(count) - FRAME_BYTES)
        scales, codes = self._parts(message[FRAME_BYTES:], count)
        if self.coding in _LEVELS:
            whole = (
                codes.view(torch.int8) if self.coding == "int8" else torch.zeros(2 * codes.numel(), dtype=torch.int8)
            )
            bits = scales.numpy().view(np.uint16)[: -(-count // BLOCK)]
            quantise(host.numpy(), _LEVELS[self.coding], bits, whole.numpy()[:count], dropped.numpy())
            if self.coding == "int4":
                torch.bitwise_or(whole[::2].view(torch.uint8) & 15, whole[1::2].view(torch.uint8) << 4, out=codes)
        else:
            short = codes.view(torch.bfloat16 if self.coding == "bf16" else torch.float16)[:count]
            scale = 1.0 if self.coding == "bf16" else _power_below(host)
            short.copy_((host * scale).clamp_(-_LARGEST, _LARGEST))
            if self.coding == "fp16":
                scales.view(torch.float32)[0] = 1 / scale
            torch.sub(host, short.float() * (1 / scale), out=dropped)
        if dropped is not rest:
            rest.copy_(dropped)
        return seal(message, _CODES[self.coding]).to(values.device)

    def decode(self, message: Tensor, count: int, *, name: str) -> Tensor:
        """The values of a message that came from another rank: float32, shape ``(count,)``, on its device.

        Args:
            message: uint8.
            count: values expected.
            name: what errors call the message.

        Raises:
            CommunicatorError: it is truncated, damaged, foreign, or of another wire format.
        """
        body = open_message(message.cpu(), _CODES[self.coding], self.size(count) - FRAME_BYTES, name=name)
        scales, codes = self._parts(body, count)
        if self.coding in _LEVELS:
            values = torch.empty(count)
            bits = scales.numpy().view(np.uint16)[: -(-count // BLOCK)]
            dequantise(bits, self._whole(codes).numpy()[:count], values.numpy())
        else:
            values = codes.view(torch.bfloat16 if self.coding == "bf16" else torch.float16)[:count].float()
            if self.coding == "fp16":
                values *= scales.view(torch.float32)[0]
        return values.to(message.device)

    def _whole(self, codes: Tensor) -> Tensor:
        """int8 codes, one byte each."""
        if self.coding == "int8":
            return codes.view(torch.int8)
        signed = codes.view(torch.int8)
        return torch.stack([(signed << 4) >> 4, signed >> 4], dim=1).view(-1)

    def _parts(self, body: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scales and codes of a body, each beginning on a word."""
        return body[: self._scale_bytes(count)], body[self._scale_bytes(count) :]

    def _scale_bytes(self, count: int) -> int:
        if self.coding in _LEVELS:
            return whole_words(2 * -(-count // BLOCK))
        return whole_words(4) if self.coding == "fp16" else 0

    def _code_bytes(self, count: int) -> int:
        return whole_words(-(-count * _BITS[self.coding] // 8))


def value_code(name: str) -> ValueCode | None:
    """The format of that name, one of :data:`VALUE_FORMATS`; None for ``"fp32"``, which is no code.

    Raises:
        ConfigurationError: no such format.
    """
    one_of("values", name, VALUE_FORMATS)
    return None if name == "fp32" else ValueCode(name)  # type: ignore[arg-type]


def _power_below(values: Tensor) -> float:
    """The power of two that brings the largest of ``values`` into [2^14, 2^15); 1 where there is none to bring."""
    largest = values.abs().amax() if values.numel() else torch.zeros(())
    if not bool(torch.isfinite(largest)) or not bool(largest > 0):
        return 1.0
    exponent = _FP16_TOP - int(torch.frexp(largest).exponent)
    return float(2.0 ** max(-126, min(126, exponent)))
