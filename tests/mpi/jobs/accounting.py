"""A job that trains and compares what RingPrune counted with what the kernel counted on its own host's interface.

Arguments: ``mpi`` or ``horovod``, rows and columns of the layer, steps. Rank 0 prints the two means over the ranks.
"""

import sys

import torch
from mpi4py import MPI

import ringprune as rp
from mpi_scripts.emulated_cluster import own_bytes
from tests.mpi.inside import start

DENSITY = 0.01


def step(model: torch.nn.Module, optimizer: rp.DistributedOptimizer, generator: torch.Generator) -> None:
    optimizer.zero_grad()
    rows = next(model.parameters()).shape[1]
    model(torch.randn(4, rows, generator=generator)).square().mean().backward()
    optimizer.step()


def main() -> None:
    kind, side, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    comm = start(kind)
    world = MPI.COMM_WORLD
    torch.manual_seed(0)
    model = torch.nn.Linear(side, side, bias=False)
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        policy=rp.IWP(DENSITY),
        comm=comm,
    )
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(2):  # connections are made, weights are compared
        step(model, optimizer, generator)
    world.Barrier()
    counted, on_interface = optimizer.stats()["bytes_sent"], own_bytes()[0]
    for _ in range(steps):
        step(model, optimizer, generator)
    world.Barrier()
    pair = (optimizer.stats()["bytes_sent"] - counted, own_bytes()[0] - on_interface)
    every = world.gather(pair, root=0)
    if every is not None:
        counted, sent = (sum(column) / len(every) for column in zip(*every, strict=True))
        print(f"counted={counted:.0f} interface={sent:.0f} ratio={sent / counted:.4f}")
    optimizer.close()


if __name__ == "__main__":
    main()
