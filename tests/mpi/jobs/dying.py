"""A training job in which one rank dies in the middle of backward, for the others to tell of."""

import os
import sys
import time

import ringprune as rp
from tests.mpi.inside import start
from tests.training import batches, loss_of, make_model, run, wrap

if __name__ == "__main__":
    comm = start(sys.argv[1], timeout=None)
    model = make_model()
    optimizer = wrap(model, comm, rp.IWP(0.05))
    run(model, optimizer, comm.rank, 3)
    optimizer.zero_grad()
    loss_of(model, next(iter(batches(comm.rank, 1, 3)))).backward()
    if comm.rank == 1:
        time.sleep(3)  # backward waits for nobody: the others have to be in step() by now, on a busy machine too
        os._exit(7)
    optimizer.step()
    print("the step was made without rank 1")
