"""A job that trains with a sharded embedding on real ranks, over the communicator named on its command line."""

import os
import sys
from functools import partial
from itertools import product

import torch
from torch import nn

import ringprune as rp
from tests.mpi.inside import check_together, start
from tests.test_embedding import CLOSE, SPARSE, Words, lookups, sharded, step_both, whole

STEPS = 12


def trains_as_a_whole_table(comm: rp.comm.Communicator) -> None:
    model, reference = Words(sharded(comm)), Words(whole(comm))
    optimizer = rp.DistributedOptimizer(
        SPARSE["adagrad"](model.parameters()), model.named_parameters(), policy="dense", comm=comm
    )
    other = SPARSE["adagrad"](reference.parameters())
    for step in range(STEPS):
        step_both(comm, step, (model, optimizer), (reference, other))
    torch.testing.assert_close(model.table.gathered(), reference.table.weight.detach(), rtol=0, atol=CLOSE)
    optimizer.close()


def pushes_between_the_messages_of_an_exchange(comm: rp.comm.Communicator) -> None:
    """Many small buckets are under way, and another number of their turns has been taken on each rank."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"words": Words(sharded(comm)), "more": nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))}
    )
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4),
        model.named_parameters(),
        policy=rp.IWP(0.1, roots="all"),
        comm=comm,
        bucket_bytes=1024,
        check_every=3,
    )
    for step in range(STEPS):
        hidden = model["more"](torch.full((2, 64), 1e-3 * (1 + comm.rank)))
        (model["words"](lookups(comm.rank, step)).sum() + hidden.tanh().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def errors_come_to_all_ranks(comm: rp.comm.Communicator) -> None:
    table = sharded(comm)
    try:
        table(torch.tensor([1, 60 if comm.rank == 1 else 2]))
    except IndexError as error:
        assert str(error).startswith("rank 1: index 60 is out of range")
    else:
        raise AssertionError("no error")
    assert table(torch.tensor([1])).shape == (1, 6)


def rows_of_16_bits(comm: rp.comm.Communicator) -> None:
    """Rounded on the way, or kept so: not every library knows these dtypes."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for values, dtype, hierarchical in product(("fp32", "bf16"), dtypes, (False, True)):
        table = sharded(comm, values=values, dtype=dtype, hierarchical=hierarchical)
        rows = table(torch.arange(53))
        whole = table.gathered()
        if values == "bf16" and dtype == torch.float32:
            whole = whole.bfloat16().float()  # also those of this rank's own
        assert torch.equal(rows.detach(), whole)
        rows.sum().backward()
        assert table.gather(table.weight.grad)[5].tolist() == [1.0] * 6
        table.close()


def one_node_owns_all(comm: rp.comm.Communicator) -> None:
    """All ranks of these jobs are on one host."""
    table, flat = sharded(comm, hierarchical=True), sharded(comm)
    assert torch.equal(table.gathered(), flat.gathered())
    for module in (table, flat):
        module(lookups(comm.rank, 0)).square().sum().backward()
    gradients = [module.gather(module.weight.grad) for module in (table, flat)]
    torch.testing.assert_close(*gradients, rtol=0, atol=CLOSE)


if __name__ == "__main__":
    kind = sys.argv[1]
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    comm = start(kind)
    checks = (
        trains_as_a_whole_table,
        pushes_between_the_messages_of_an_exchange,
        errors_come_to_all_ranks,
        rows_of_16_bits,
        one_node_owns_all,
    )
    for check in checks:
        check_together(kind, check.__name__, partial(check, comm))
    if comm.rank == 0:
        print(f"{len(checks)} checks passed on {comm.size} ranks")
