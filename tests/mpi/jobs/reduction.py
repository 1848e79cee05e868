"""A job that runs the checks of the reductions over MPI."""

from functools import partial

from tests.mpi.inside import check_together, start
from tests.reduction.checks import CHECKS

if __name__ == "__main__":
    comm = start("mpi")
    for name, check in CHECKS.items():
        check_together("mpi", name, partial(check, comm))
    comm.close()
    if comm.rank == 0:
        print(f"{len(CHECKS)} checks passed on {comm.size} ranks", flush=True)
