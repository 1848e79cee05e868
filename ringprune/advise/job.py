"""Measures the job that this process is a rank of: links, collectives, and processors where that is asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from ringprune.advise.overheads import overheads
from ringprune.comm.choice import check_installed, connect, started
from ringprune.comm.communicator import Communicator
from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.prediction import Kind, Link, MeasuredLink, Speeds
from ringprune.probing.collectives import measured_link
from ringprune.probing.links import probe, reached
from ringprune.probing.speeds import measured_together

__all__ = ["KINDS", "Job", "Over", "likely", "measure_job"]

Over = Literal["horovod", "torch", "mpi"]
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


def likely() -> Over:
    """What a job started like this one trains over: torchrun's over torch, others over Horovod if it is there."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    return "horovod" if find_spec("horovod") else "mpi"


def measure_job(over: Over, *, processors: bool) -> Job:
    """Measure; all ranks call this.

    Args:
        over: the collectives of which library. It is started; torch.distributed with Gloo.
        processors: measure them too, on all ranks at once.

    Raises:
        ConfigurationError: there is one rank, or nothing that sends from rank to rank.
        DependencyError: that library is missing.
        UsageError: the launcher is not one of that library.
    """
    check_installed(over)
    with _ranks(over) as ranks:
        link = probe(ranks)
        # Before Horovod is there: its threads, which wait for one another without a pause, would take half of the time.
        speeds = measured_together(ranks, *overheads(together=True)) if processors else None
        with started(over) if over == "horovod" else nullcontext(ranks) as comm:
            kinds = [kind for kind in KINDS if ("shift" if kind == "ring" else kind) in comm.abilities]
            network = measured_link(comm, kinds)
    return Job(ranks.rank, reached(link, network), network, speeds)


@contextmanager
def _ranks(over: Over) -> Iterator[Communicator]:
    """What sends from rank to rank: Horovod's ranks do that over MPI."""
    if over != "horovod":
        with started(over) as comm:
            yield comm
        return
    try:
        comm = connect("mpi")
    except RingPruneError as error:
        raise ConfigurationError(
            "--rate here measures links by messages from rank to rank, which Horovod does not have, and MPI is not "
            f"there ({error}). Start the job with mpirun, or torchrun with --communicator torch, or give the rate"
        ) from error
    try:
        yield comm
    finally:
        comm.close()
