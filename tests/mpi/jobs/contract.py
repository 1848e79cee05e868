"""A job that runs the contract over the communicators named on its command line, one after the other."""

import sys
from functools import partial

from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, start


def gives_back() -> None:
    """A duplicate that was closed serves the next one; MPI has only so many."""
    from ringprune.comm import connect, mpi

    connect("mpi").close()
    made = len(mpi._duplicates)
    for _ in range(3):
        connect("mpi").close()
        assert len(mpi._duplicates) == made


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        comm = start(kind)
        for name, check in CHECKS.items():
            check_together(kind, f"{name} over {kind}", partial(check, comm))
        comm.close()
        if kind == "mpi":
            check_together(kind, "what was closed is given back", gives_back)
        if comm.rank == 0:
            print(f"{kind}: {len(CHECKS)} checks passed on {comm.size} ranks", flush=True)
    if "horovod" in sys.argv:
        # It ends MPI in all ranks when the first one ends: not while another is in a call of MPI.
        check_together("horovod", "all have come to the end", lambda: None)
