"""Rates of links: how they are written, and the token bucket that keeps them."""

import re
from dataclasses import dataclass

from .errors import ClusterArgumentError
from .tools import in_network, run, tc

__all__ = ["UNLIMITED", "bits_per_second", "configured_rate", "set_rate", "written"]

UNLIMITED = "unlimited"
LOWEST, HIGHEST = 1e6, 100e9
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
# One 64 KiB frame as the kernel hands it over (GSO), with the headers of all its segments, is 68.5 kB: a bucket that
# does not hold one drops to a part of the rate.
FULL_FRAME = 72_000
LATE_TIMER = 1e-3  # seconds a timer may be late without costing throughput


@dataclass(frozen=True)
class _Bucket:
    """Arguments of the kernel's token bucket filter: rate in bit/s, burst and limit in bytes."""

    rate: int
    burst: int
    limit: int


def bits_per_second(rate: str) -> float | None:
    """Read a rate such as ``"100mbit"``, ``"2.5gbit"`` or ``"unlimited"`` (None).

    Raises:
        ClusterArgumentError: it cannot be read, or lies outside of 1mbit to 100gbit.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.strip().lower())
    if not match:
        raise ClusterArgumentError(f'rate {rate!r}: write it like "100mbit", "2.5gbit" or "unlimited"')
    bits = float(match[1]) * FACTORS[match[2]]
    if not LOWEST <= bits <= HIGHEST:
        raise ClusterArgumentError(f'rate {rate!r}: allowed are 1mbit to 100gbit, and "unlimited"')
    return bits


def written(bits: float | None) -> str:
    """A rate as people write it."""
    if bits is None:
        return UNLIMITED
    for letter in "gmk":
        if bits >= FACTORS[letter]:
            return f"{bits / FACTORS[letter]:g}{letter}bit"
    return f"{bits:g}bit"


def set_rate(pid: int, device: str, bits: float | None, queue_ms: float) -> None:
    """Limit what leaves ``device``, in the network namespace of ``pid``, to ``bits`` per second of whole frames.

    Args:
        pid: a process in the namespace.
        device: name of the interface.
        bits: None takes the limit away.
        queue_ms: milliseconds of traffic that wait before frames are dropped; three full frames at least.
    """
    if bits is None:
        if configured_rate(pid, device) is not None:
            run(*in_network(pid, "tc", "qdisc", "del", "dev", device, "root"))
        return
    bucket = _bucket(bits, queue_ms)
    settings = ["rate", f"{bucket.rate}bit", "burst", str(bucket.burst), "limit", str(bucket.limit)]
    run(*in_network(pid, "tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf", *settings))


def configured_rate(pid: int, device: str) -> float | None:
    """The rate in bit/s that the kernel keeps on ``device`` now; None where there is no limit."""
    for discipline in tc(pid, "qdisc", "show", "dev", device) or []:
        if discipline["kind"] == "tbf":
            return 8.0 * float(discipline["options"]["rate"])
    return None


def _bucket(bits: float, queue_ms: float) -> _Bucket:
    return _Bucket(
        rate=round(bits),
        burst=int(max(FULL_FRAME, bits / 8 * LATE_TIMER)),
        limit=int(max(3 * FULL_FRAME, bits / 8 * queue_ms / 1e3)),
    )
