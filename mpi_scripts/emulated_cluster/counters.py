"""Bytes and frames on the links, as the kernel counts them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .tools import ip, tc

__all__ = ["Counters", "own_bytes", "read_counters"]


@dataclass(frozen=True)
class Counters:
    """What has gone over one host's link since it was made.

    ``tx_bytes`` and ``rx_bytes`` count a frame as the host hands it over: up to 64 KiB of payload with one header of 66
    bytes, so they are payload within 0.3 % for large messages. The wire bytes are counted after segmentation, where
    each 1448 bytes of payload carry their 66 bytes of headers; they are None while the link is unlimited.

    Attributes:
        tx_bytes: sent by the host.
        rx_bytes: received by the host.
        tx_frames: sent by the host, each up to 64 KiB.
        rx_frames: received by the host.
        up_wire_bytes: host to switch, through the rate limit.
        up_drops: frames dropped there.
        down_wire_bytes: switch to host, through the rate limit.
        down_drops: frames dropped there.
    """

    tx_bytes: int
    rx_bytes: int
    tx_frames: int
    rx_frames: int
    up_wire_bytes: int | None
    up_drops: int | None
    down_wire_bytes: int | None
    down_drops: int | None


def read_counters(host: int, switch: int, port: str) -> Counters:
    """Counters of the link between the ``eth0`` of process ``host`` and the ``port`` of process ``switch``."""
    stats = ip(host, "-s", "link", "show", "eth0")[0]["stats64"]
    up, down = _limited(host, "eth0"), _limited(switch, port)
    return Counters(
        tx_bytes=stats["tx"]["bytes"],
        rx_bytes=stats["rx"]["bytes"],
        tx_frames=stats["tx"]["packets"],
        rx_frames=stats["rx"]["packets"],
        up_wire_bytes=up.get("bytes"),
        up_drops=up.get("drops"),
        down_wire_bytes=down.get("bytes"),
        down_drops=down.get("drops"),
    )


def own_bytes(interface: str = "eth0") -> tuple[int, int]:
    """Bytes sent and received by the caller's own host; for ranks, which read it before and after what they measure.

    Raises:
        ClusterError: there is no such interface.
    """
    # /proc/self/net follows the namespace of the reader.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return fields[8], fields[0]
    raise ClusterError(f"this host has no interface {interface}")


def _limited(pid: int, device: str) -> dict[str, Any]:
    for discipline in tc(pid, "-s", "qdisc", "show", "dev", device) or []:
        if discipline["kind"] == "tbf":
            return dict(discipline)
    return {}
