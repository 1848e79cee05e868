"""A job that resumes as Horovod's own examples do: rank 0 loads its checkpoint, Horovod broadcasts what it knows of.

Argument: the policy, ``iwp`` or ``dense``.
"""

import copy
import sys

import horovod.torch as hvd
import torch

import ringprune as rp
from tests.mpi.inside import watchdog
from tests.training import make_model, run

POLICIES = {"iwp": rp.IWP(0.05), "dense": rp.Dense()}


def wrapped(model: torch.nn.Module, policy: str) -> rp.DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return rp.DistributedOptimizer(sgd, model.named_parameters(), policy=POLICIES[policy])


def main(policy: str) -> None:
    model = make_model()
    optimizer = wrapped(model, policy)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    run(model, optimizer, hvd.rank(), 3)
    saved = copy.deepcopy(optimizer.state_dict())  # as a file has it
    optimizer.close()

    optimizer = wrapped(model, policy)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    print("broadcast", flush=True)


if __name__ == "__main__":
    watchdog()
    hvd.init()
    main(*sys.argv[1:])
