"""A job on two hosts with two ranks each: what a hierarchy counts is what the kernel sees on the link between them."""

import os
import sys
from typing import Any

import torch
from torch import nn

import ringprune as rp
from mpi_scripts.emulated_cluster.counters import own_bytes
from tests.mpi.inside import start

STEPS, WIDTH = 4, 700


def trained(comm: rp.comm.Communicator, policy: rp.Policy, **options: Any) -> tuple[dict[str, Any], int]:
    """What was counted, and the bytes that this host has sent meanwhile."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(model.weight, 0.1)
    named = model.named_parameters()
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = rp.DistributedOptimizer(inner, named, policy=policy, comm=comm, **options)
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(STEPS + 1):
        if step == 1:  # the first one compares weights and compiles
            comm.allreduce(torch.ones(1), name="begin").wait()
            before, counted = own_bytes()[0], optimizer.stats()
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH, generator=generator)).square().sum().backward()
        optimizer.step()
    comm.allreduce(torch.ones(1), name="end").wait()
    seen, stats = own_bytes()[0] - before, optimizer.stats()
    optimizer.close()
    return {key: stats[key] - counted[key] for key in counted if key.startswith("bytes")}, seen


if __name__ == "__main__":
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    kind = sys.argv[1]
    comm = start(kind)
    nodes = comm.divide()
    assert (nodes.count, nodes.local.size) == (2, 2), (nodes.count, nodes.local.size)
    for policy in (rp.Dense(), rp.IWP(0.05)):
        counted, seen = trained(comm, policy, hierarchical=True)
        _, flat = trained(comm, policy)
        if nodes.across is not None:
            # Of both hosts: who sends more in a broadcast is the library's choice. Frames carry at most 5 % of headers
            # and acknowledgements. What all ranks say to each other (verdicts, and Horovod's background thread, which
            # speaks all the time) is small, and sent by routes of the library's own.
            sent = counted["bytes_sent"] - counted["bytes_headers"]
            totals = nodes.across.allreduce(torch.tensor([sent, seen, flat], dtype=torch.float64), name="both").wait()
            sent, seen, flat = totals.tolist()
            small = 400_000 if kind == "horovod" else 40_000
            if comm.rank == 0:
                print(f"{kind}, {policy.name}: counted {sent:.0f}, sent {seen:.0f}, flat {flat:.0f}", flush=True)
            assert sent <= seen <= 1.05 * sent + small, (sent, seen)
        comm.allreduce(torch.ones(1), name="compared").wait()  # Horovod ends where a rank of it ends
    if comm.rank == 0:
        print(f"{nodes.count} nodes of {nodes.local.size} ranks", flush=True)
