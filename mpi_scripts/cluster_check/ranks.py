"""Who the ranks of a job are: host, machine, cores, versions, MPI's thread level."""

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mpi4py import MPI

__all__ = ["Rank", "describe_mpi", "gather", "hosts_of", "leaders_of"]

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
PACKAGES = ("ringprune", "torch", "horovod", "mpi4py", "numpy")


@dataclass(frozen=True)
class Rank:
    """One rank.

    Attributes:
        rank: its number.
        host: its hostname.
        machine: what hosts of one kernel have in common: containers, emulated hosts.
        local_rank: its number among the ranks of its host.
        cores: the cores it may run on.
        threads: ``OMP_NUM_THREADS`` as it is set; None where it is not.
        thread_level: what MPI allows its threads: single, funneled, serialized, multiple.
        versions: of what has to be equal on all hosts.
    """

    rank: int
    host: str
    machine: str
    local_rank: int
    cores: tuple[int, ...]
    threads: str | None
    thread_level: str
    versions: dict[str, str]


def gather(world: MPI.Intracomm) -> list[Rank]:
    """All ranks in their order, on every rank. Collective."""
    host = socket.gethostname()
    local_rank = world.allgather(host)[: world.rank].count(host)
    mine = Rank(
        rank=world.rank,
        host=host,
        machine=_machine(host),
        local_rank=local_rank,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=os.environ.get("OMP_NUM_THREADS"),
        thread_level=THREAD_LEVELS[MPI.Query_thread()],
        versions={"Python": platform.python_version(), "MPI": describe_mpi()} | _versions(),
    )
    return list(world.allgather(mine))


def describe_mpi() -> str:
    """Vendor and version in one line."""
    return " ".join(MPI.Get_library_version().split(",")[0].split())


def hosts_of(ranks: Sequence[Rank]) -> list[str]:
    """Host names in the order of their first ranks."""
    return list(dict.fromkeys(each.host for each in ranks))


def leaders_of(ranks: Sequence[Rank]) -> list[Rank]:
    """The first rank of each host."""
    return [each for each in ranks if each.local_rank == 0]


def _machine(host: str) -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
