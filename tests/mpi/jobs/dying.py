"""A training job in which one rank dies in the middle of a step, for the others to tell of.

Arguments: the kind of communicator, and the policy: ``iwp`` waits in step(), ``p3`` in the next forward pass.
"""

import os
import sys
import time

import torch

import ringprune as rp
from tests.mpi.inside import start
from tests.training import batches, loss_of, make_model, run, sgd

if __name__ == "__main__":
    comm = start(sys.argv[1], timeout=None)
    model = make_model()
    policy = {"iwp": rp.IWP(0.05), "p3": rp.P3()}[sys.argv[2]]
    named = model.named_parameters()
    optimizer = rp.DistributedOptimizer(sgd(model.parameters()), named, policy=policy, comm=comm, model=model)
    run(model, optimizer, comm.rank, 3)
    optimizer.zero_grad()
    loss = loss_of(model, next(iter(batches(comm.rank, 1, 3))))
    if comm.rank != 1 or sys.argv[2] == "iwp":  # with a schedule all that the others need goes out during backward
        loss.backward()
    if comm.rank == 1:
        time.sleep(3)  # the others have to wait by now, on a busy machine too
        os._exit(7)
    optimizer.step()
    model(torch.ones(1, 64))
    print("the step was made without rank 1")
