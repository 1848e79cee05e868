"""A job on two hosts with two ranks each: what a hierarchy counts is what the kernel sees on the link between them."""

import os
import sys

import torch
from torch import nn

import ringprune as rp
from mpi_scripts.emulated_cluster.counters import own_bytes
from tests.mpi.inside import start

STEPS, WIDTH = 4, 700


def trained(comm: rp.comm.Communicator, policy: rp.Policy, hierarchical: bool) -> tuple[float, int]:
    """Bytes counted, and bytes that this host has sent."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(model.weight, 0.1)
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model.named_parameters(),
        policy=policy,
        comm=comm,
        hierarchical=hierarchical,
    )
    generator = torch.Generator().manual_seed(comm.rank)
    comm.allreduce(torch.ones(1), name="begin").wait()
    before = own_bytes()[0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH, generator=generator)).square().sum().backward()
        optimizer.step()
    comm.allreduce(torch.ones(1), name="end").wait()
    seen = own_bytes()[0] - before
    optimizer.close()
    assert hierarchical == (optimizer_nodes(comm, hierarchical) > 0)
    return comm.traffic.bytes_sent, seen


def optimizer_nodes(comm: rp.comm.Communicator, hierarchical: bool) -> int:
    return 2 if hierarchical else 0


if __name__ == "__main__":
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
