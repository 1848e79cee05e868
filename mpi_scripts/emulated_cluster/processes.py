"""Processes: who is still the same one, who is inside a network namespace, and ending them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "boot", "end", "network_of", "processes_inside"]

POLL_SECONDS = 0.02
KILL_AFTER = 3.0


@dataclass(frozen=True)
class Process:
    """A process that is not mistaken for a later one with the same number.

    Attributes:
        pid: its number.
        start: clock ticks from boot to its start.
    """

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process that has this number now; None where there is none, or only a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return Process.of(self.pid) == self

    @property
    def command(self) -> str:
        """The beginning of its command line."""
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return "?"
        return " ".join(words).strip()[:60] or "?"

    def has_variable(self, assignment: str) -> bool:
        """Whether it was started with ``NAME=value`` in its environment."""
        try:
            return assignment.encode() in Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def boot() -> str:
    """What tells this run of the machine from the one before: numbers and ticks of processes begin anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_of(pid: int) -> int | None:
    """The number of the network namespace that ``pid`` is in; None where it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def processes_inside(networks: Iterable[int]) -> Iterator[tuple[Process, int]]:
    """Every process in one of these network namespaces, with the namespace's number."""
    wanted = set(networks)
    for name in os.listdir("/proc"):
        if name.isdigit() and (network := network_of(int(name))) in wanted and (found := Process.of(int(name))):
            assert network is not None
            yield found, network


def end(processes: Iterable[Process], patience: float = KILL_AFTER) -> None:
    """Ask processes to end, kill those that have not after ``patience`` seconds, and wait until all are gone."""
    left = list(processes)
    for signal_number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, KILL_AFTER)):
        for process in left:
            if process.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal_number)
        left = _still_there(left, seconds)


def _still_there(processes: list[Process], seconds: float) -> list[Process]:
    limit = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive]) and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    return left
