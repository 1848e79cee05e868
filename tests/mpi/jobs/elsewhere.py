"""A job in which rank 0 is in a step while the others are not: it has a batch more, or has loaded no checkpoint.

Arguments: the kind of communicator, the policy, and where the others are: ``flush`` or ``load``.
"""

import sys
import time
import traceback

import torch

import ringprune as rp
from tests.mpi.inside import start


def main(kind: str, policy: str, where: str) -> None:
    comm = start(kind, timeout=3.0)  # within which ranks come to a step, on a busy machine too
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 10))
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), model.named_parameters(), policy=policy, comm=comm
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 300)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    saved = optimizer.state_dict()
    try:
        if comm.rank == 0:
            step()
        elif where == "flush":
            optimizer.flush()
        else:
            optimizer.load_state_dict(saved)
            step()
    except rp.CommunicatorError:
        traceback.print_exc()
        time.sleep(4)  # the first to end takes the others along, before they have said what they waited for
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
