"""A job that runs the contract over the communicators named on its command line, one after the other."""

import sys
from functools import partial

from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, start

if __name__ == "__main__":
    for kind in sys.argv[1:]:
        comm = start(kind)
        for name, check in CHECKS.items():
            check_together(kind, f"{name} over {kind}", partial(check, comm))
        comm.close()
        if comm.rank == 0:
            print(f"{kind}: {len(CHECKS)} checks passed on {comm.size} ranks", flush=True)
