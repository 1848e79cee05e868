"""What the exchange costs a rank's processor, in seconds per entry, value, index, message and tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ringprune.wire import value_code

__all__ = ["CPU", "DENSITIES", "DEVICES", "GPU", "Speeds", "each_at"]

KEPT = ("provenance", "shared")
"""What is no time."""

DENSITIES = {"apart": 0.01, "close": 0.1}
"""At which costs are known that depend on it: of close entries several lie in one cache line."""


@dataclass(frozen=True)
class Speeds:
    """Seconds on one rank.

    Attributes:
        provenance: measured on what, or assumed, for people.
        accumulate: per entry: add gradients to the residual.
        select: per entry: accumulate, score and select in one pass; by ``DENSITIES``.
        copy: per entry: copy a bucket into a message, or out of it.
        whole: per entry that travels as it is: look for NaN.
        fill: per entry: write the dense gradients anew at unpacking, zeros for the most part.
        kept: per entry of the index set: taken out of the residual, or put into the gradients; by ``DENSITIES``.
        merge: per pair of index and value that is summed, where each rank has its own.
        encode_index, decode_index: per position of a proposal.
        unite: per position of several proposals, that become one set; by ``DENSITIES``.
        encode_values, decode_values: per value, by format.
        message: per collective: Python's and the library's share.
        tensor: per tensor: hooks, checks, launches.
        shared: by which factor all of these are longer since ranks share processors and wait for them; 1 where not.
    """

    provenance: str
    accumulate: float
    select: Mapping[str, float]
    copy: float
    whole: float
    fill: float
    kept: Mapping[str, float]
    merge: float
    encode_index: float
    decode_index: float
    unite: Mapping[str, float]
    encode_values: Mapping[str, float]
    decode_values: Mapping[str, float]
    message: float
    tensor: float
    shared: float = 1.0

    def times(self, factor: float) -> "Speeds":
        """Those of a processor that takes ``factor`` times as long for everything."""

        def longer(name: str) -> float | Mapping[str, float]:
            seconds: float | Mapping[str, float] = getattr(self, name)
            return {k: factor * s for k, s in seconds.items()} if isinstance(seconds, Mapping) else factor * seconds

        costs: dict[str, Any] = {field.name: longer(field.name) for field in fields(self) if field.name not in KEPT}
        return replace(self, provenance=f"{self.provenance}, times {factor:g}", **costs)

    def __str__(self) -> str:
        """The figures that matter most, for people."""
        select = f"{1e9 * self.select['apart']:.2f} select ({1e9 * self.select['close']:.2f} at 10 %)"
        entry = f"{1e9 * self.accumulate:.2f} accumulate, {select}, {1e9 * self.copy:.2f} copy"
        code = f"{1e9 * self.encode_index:.1f} code, {1e9 * self.decode_index:.1f} decode"
        whole = f"{1e9 * self.whole:.2f} whole, {1e9 * self.fill:.2f} fill"
        kept = f"{1e9 * self.kept['apart']:.1f} take or put ({1e9 * self.kept['close']:.1f} at 10 %)"
        return (
            f"ns per entry: {entry}, {whole}; per entry kept: {kept}, {code}; us: "
            f"{1e6 * self.message:.0f} per message, {1e6 * self.tensor:.0f} per tensor"
        )


def each_at(each: Mapping[str, float], density: float) -> float:
    """Seconds that depend on the density: as ``apart`` up to 1 %, from there on a power of it."""
    apart, close = DENSITIES.values()
    share = each["close"] / each["apart"] if each["apart"] else 1.0
    return float(each["apart"] * share ** math.log(max(density, apart) / apart, close / apart))


CPU = Speeds(
    provenance="measured on 2 threads of an Intel Xeon (Sapphire Rapids), 2026-11-28 (docs/benchmarks.md)",
    accumulate=0.66e-9,
    select={"apart": 0.92e-9, "close": 1.55e-9},
    copy=0.32e-9,
    whole=0.09e-9,
    fill=0.08e-9,
    kept={"apart": 6e-9, "close": 2.3e-9},
    merge=5.8e-9,
    encode_index=2.1e-9,
    decode_index=1.8e-9,
    unite={"apart": 8.4e-9, "close": 4.3e-9},
    encode_values={"bf16": 1.2e-9, "fp16": 1.7e-9, "int8": 2.3e-9, "int4": 2.8e-9, "book4": 1.9e-9, "book2": 1.5e-9},
    decode_values={"bf16": 0.86e-9, "fp16": 1.05e-9, "int8": 1.4e-9, "int4": 2e-9, "book4": 0.62e-9, "book2": 0.53e-9},
    message=50e-6,
    tensor=14e-6,
)
"""``ringprune advise --measure`` tells these of another machine."""

_MEMORY = 1e12  # bytes per second that a pass reaches: half of an A100's 2e12
_BUS = 1e10  # from a GPU to its host and back: PCIe 3, 16 lanes, less what it loses
_SECTOR = 32  # bytes that memory moves at least, where entries lie apart
_WAIT = 50e-6  # to wait for the GPU and start it again
_MANY = 1 << 20  # values, whose message has next to nothing besides


def _over_the_bus(seconds: float) -> float:
    """What is coded on the host, 4 bytes each, and brought there or back."""
    return seconds + 4 / _BUS


def _coded_there(name: str) -> float:
    """A value that is coded on the GPU, by some passes over it, and brought to the host or back in that format."""
    code = value_code(name)
    assert code is not None, "float32 has no code"
    return 40 / _MEMORY + code.size(_MANY) / _MANY / _BUS


GPU = replace(
    CPU,
    provenance="ASSUMED, not measured: passes at 1 TB/s of GPU memory, index sets coded on the host, 10 GB/s to it",
    accumulate=20 / _MEMORY,
    select={"apart": 28 / _MEMORY, "close": 34 / _MEMORY},
    copy=8 / _MEMORY,
    whole=4 / _MEMORY,
    fill=4 / _MEMORY,
    kept={"apart": 4 * _SECTOR / _MEMORY, "close": 0.71 * 4 * _SECTOR / _MEMORY},  # so many sectors each, at random
    merge=_over_the_bus(CPU.merge),
    encode_index=_over_the_bus(CPU.encode_index),
    decode_index=_over_the_bus(CPU.decode_index),
    encode_values={name: _coded_there(name) for name in CPU.encode_values},
    decode_values={name: _coded_there(name) for name in CPU.decode_values},
    message=CPU.message + _WAIT,
)
"""No GPU was at hand. 20 bytes per entry are accumulated, 24 selected from and a sixth more work in the cores; at 10 %
candidates are written and read besides."""

DEVICES = {"cpu": CPU, "gpu": GPU}
"""Where gradients live, by the word for it."""
