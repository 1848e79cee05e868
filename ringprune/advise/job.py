"""Measures the job that this process is a rank of: links, collectives, and processors where that is asked for."""

from dataclasses import dataclass
from typing import get_args

from ringprune.advise.overheads import overheads
from ringprune.comm import connect
from ringprune.prediction import Kind, Link, MeasuredLink, Speeds
from ringprune.probing.collectives import measured_link
from ringprune.probing.links import probe, reached
from ringprune.probing.speeds import measured_together

__all__ = ["Job", "measure_job"]

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Job:
    """What was measured, the same on all ranks.

    Attributes:
        rank: this one.
        link: what messages to the next rank take, and the share of its rate that collectives reach.
        network: what collectives take.
        speeds: of the processors; None where nobody asked.
    """

    rank: int
    link: Link
    network: MeasuredLink
    speeds: Speeds | None


def measure_job(*, processors: bool) -> Job:
    """Measure over MPI; all ranks call this.

    Args:
        processors: measure them too, on all ranks at once.

    Raises:
        ConfigurationError: there is one rank.
    """
    comm = connect("mpi")
    try:
        link = probe(comm)
        network = measured_link(comm, KINDS)
        speeds = measured_together(comm, *overheads(together=True)) if processors else None
        return Job(comm.rank, reached(link, network), network, speeds)
    finally:
        comm.close()
