"""How busy the machine is, and how much of that is this process: what is left is other people's work."""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Busy", "machine", "now"]

COUNTERS = Path("/proc/stat")
BOOT = Path("/proc/sys/kernel/random/boot_id")
WORKING = (0, 1, 2, 7)
"""Columns: user, nice, system, and stolen by other virtual machines. Interrupts are left out: packets cause them."""


@dataclass(frozen=True)
class Busy:
    """Seconds up to a moment, or between two.

    Attributes:
        wall: of the clock.
        own: CPU seconds of this process, all threads.
        machine: CPU seconds of everything on the machine; None where it does not tell.
    """

    wall: float
    own: float
    machine: float | None

    def since(self, before: "Busy") -> "Busy":
        """What came to pass after ``before``."""
        known = self.machine is not None and before.machine is not None
        return Busy(
            self.wall - before.wall,
            self.own - before.own,
            self.machine - before.machine if known else None,
        )


def now() -> Busy:
    """Up to now."""
    return Busy(time.perf_counter(), time.process_time(), _machine_seconds())


def machine() -> str:
    """What tells machines apart, whatever hosts they are divided into."""
    return BOOT.read_text().strip() if BOOT.exists() else platform.node()


def _machine_seconds() -> float | None:
    if not COUNTERS.exists():
        return None
    ticks = [int(word) for word in COUNTERS.read_text().split("\n", 1)[0].split()[1:]]
    return sum(ticks[column] for column in WORKING if column < len(ticks)) / os.sysconf("SC_CLK_TCK")
