"""What test programs use inside a job: a watchdog, and verdicts that all ranks reach together."""

import faulthandler
import os
import traceback
from collections.abc import Callable

import torch.distributed

from ringprune.comm import Communicator, connect


def watchdog() -> None:
    """End this process, with the stacks of its threads, shortly before the job's time limit."""
    faulthandler.dump_traceback_later(float(os.environ.get("RINGPRUNE_TEST_SECONDS", "60")), exit=True)


def start(kind: str, timeout: float | None = 20.0) -> Communicator:
    """Start the watchdog and the library, and connect."""
    watchdog()
    if kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
    if kind == "torch":
        torch.distributed.init_process_group("gloo")
    return connect(kind, timeout=timeout)


def check_together(kind: str, name: str, check: Callable[[], None]) -> None:
    """Run ``check`` on this rank, then fail on all ranks if it failed on any.

    A rank whose check fails would leave the others waiting inside a collective. With a time limit on the communicator
    they come out of it, everybody exchanges verdicts, and the job ends with the tracebacks of the ranks that failed.

    Args:
        kind: ``"horovod"``, ``"mpi"`` or ``"torch"``: over what the verdicts travel.
        name: what is checked.
        check: what to run.

    Raises:
        AssertionError: on all ranks, listing those that failed, with this rank's own traceback or the first one's.
    """
    verdict = None
    try:
        check()
    except Exception:
        verdict = traceback.format_exc()
    failed = {rank: text for rank, text in enumerate(_verdicts(kind, verdict)) if text is not None}
    if failed:
        first = min(failed)
        raise AssertionError(f"{name} failed on ranks {sorted(failed)}\n{verdict or f'rank {first}: {failed[first]}'}")


def _verdicts(kind: str, verdict: str | None) -> list[str | None]:
    """Every rank's verdict, by the library's own means: the communicator is what is being tested."""
    if kind == "horovod":
        import horovod.torch as hvd

        return list(hvd.allgather_object(verdict, name="verdict"))
    if kind == "torch":
        verdicts: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(verdicts, verdict)
        return verdicts
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(verdict)
