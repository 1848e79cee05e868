"""A job in which rank 1 gets into trouble while the other ranks are in a collective.

Arguments: the kind of communicator, what rank 1 does, and the communicator's time limit in seconds (or ``none``).
"""

import os
import signal
import sys
import time

import torch

from tests.mpi.inside import check_together, start


def trouble(how: str) -> None:
    """Do it, once the others are surely waiting, on a busy machine too."""
    time.sleep(1)
    if how == "exits":
        os._exit(3)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("boom on rank 1")
    if how == "never comes":
        time.sleep(1000)


def main(kind: str, how: str, limit: str) -> None:
    comm = start(kind, timeout=None if limit == "none" else float(limit))
    comm.allreduce(torch.ones(3), name="before").wait()

    def collective() -> None:
        if comm.rank == 1:
            trouble(how.removesuffix(" in a check"))
        comm.allreduce(torch.ones(1200), name="bucket 3 values").wait()

    if how.endswith(" in a check"):
        check_together(kind, "the collective", collective)
    else:
        collective()


if __name__ == "__main__":
    main(*sys.argv[1:])
