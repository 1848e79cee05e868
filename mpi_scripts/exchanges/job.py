"""The ranks of the job this process runs in, as the comparison needs them: a number, a barrier, a gathering."""

import os
import platform
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from exchanges.errors import CannotRun

__all__ = ["Job", "current_job", "in_job", "started_by"]

RING = "4"
"""Open MPI's number of the ring allreduce."""


class Job(Protocol):
    """All ranks of a job.

    Attributes:
        kind: ``"mpi"`` or ``"torch"``: what started it.
        rank: number of this rank.
        size: number of ranks.
        library: what carries it, with its version.
        ring: whether Open MPI was told to allreduce along a ring.
    """

    kind: str
    rank: int
    size: int
    library: str
    ring: bool

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def gather(self, what: Any) -> list[Any]:
        """What every rank has to say, on every rank, in rank order."""
        ...

    def join_torch(self) -> None:
        """Initialise torch.distributed over Gloo, once."""
        ...

    def close(self) -> None:
        """Leave torch.distributed, where it was joined."""
        ...

    def abort(self) -> NoReturn:
        """End all ranks: this one has failed, and the others would wait for it."""
        ...


class _MpiJob:
    """Started by ``mpirun``, or by another launcher of MPI."""

    kind = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.library = MPI.Get_library_version().split(",")[0].split("\n")[0]
        self.ring = forced_ring(os.environ)

    def barrier(self) -> None:
        self._world.Barrier()

    def gather(self, what: Any) -> list[Any]:
        return self._world.allgather(what)

    def join_torch(self) -> None:
        from torch import distributed

        if distributed.is_initialized():
            return
        place = None
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                place = platform.node(), free.getsockname()[1]
        address, port = self._world.bcast(place)
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}:{port}", rank=self.rank, world_size=self.size
        )

    def close(self) -> None:
        _leave_torch()

    def abort(self) -> NoReturn:
        self._world.Abort(1)
        raise SystemExit(1)


class _TorchJob:
    """Started by ``torchrun`` or ``cluster launch``: ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` are set."""

    kind = "torch"
    ring = False

    def __init__(self) -> None:
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.library = f"Gloo of torch {torch.__version__}"

    def barrier(self) -> None:
        from torch import distributed

        distributed.barrier()

    def gather(self, what: Any) -> list[Any]:
        from torch import distributed

        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, what)
        return gathered

    def join_torch(self) -> None:
        """It is there already."""

    def close(self) -> None:
        _leave_torch()

    def abort(self) -> NoReturn:
        os._exit(1)  # the launcher ends the others


def _leave_torch() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def forced_ring(environment: Mapping[str, str]) -> bool:
    """Whether ``mpirun --mca`` has chosen the ring for every allreduce."""
    chosen = environment.get("OMPI_MCA_coll_tuned_allreduce_algorithm")
    return chosen == RING and environment.get("OMPI_MCA_coll_tuned_use_dynamic_rules") in ("1", "true")


def started_by(environment: Mapping[str, str]) -> str | None:
    """``"mpi"`` or ``"torch"`` for a rank of such a job; None for a process that nobody launched as one."""
    if any(name in environment for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")):
        return "mpi"
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return "torch"
    return None


def current_job() -> Job:
    """The job this process is a rank of.

    Raises:
        CannotRun: what is needed for it is not installed.
    """
    try:
        return _TorchJob() if started_by(os.environ) == "torch" else _MpiJob()
    except ImportError as error:
        raise CannotRun(f"{error}; ringprune doctor says what is missing") from error


@contextmanager
def in_job() -> Iterator[Job]:
    """The job this process is a rank of; an error inside ends all ranks, which would wait for this one.

    Raises:
        CannotRun: what is needed for it is not installed, or cannot run in it; on all ranks alike.
    """
    job = current_job()
    try:
        yield job
    except CannotRun:
        raise
    except Exception:
        traceback.print_exc()
        job.abort()
    finally:
        job.close()
