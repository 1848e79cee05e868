"""Which host a rank runs on, for libraries that do not tell."""

import hashlib
import platform
from pathlib import Path

__all__ = ["host_number"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_number() -> int:
    """A number, 63 bits, that processes on one host have in common and others do not.

    Of the host's name and of the boot of its kernel: names occur twice, and containers share a kernel. NCCL tells
    hosts apart by the same two.
    """
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    digest = hashlib.sha256(f"{platform.node()} {boot}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
