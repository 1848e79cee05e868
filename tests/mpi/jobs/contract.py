"""A job that runs the contract over the communicator named on its command line."""

import sys
from functools import partial

from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, start

if __name__ == "__main__":
    kind = sys.argv[1]
    comm = start(kind)
    for name, check in CHECKS.items():
        check_together(kind, name, partial(check, comm))
    comm.close()
    if comm.rank == 0:
        print(f"{len(CHECKS)} checks passed on {comm.size} ranks")
