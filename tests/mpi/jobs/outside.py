"""A job in which a rank is outside the group: it trains alone, to the end, before the others have begun."""

import sys
from typing import Any

import torch

import ringprune as rp
from tests.mpi.inside import watchdog
from tests.training import make_model, nesterov, run, same_bytes, weights


def group_of(kind: str, ranks: list[int]) -> dict[str, Any]:
    """The option of rp.connect that gives it some ranks."""
    if kind == "horovod":
        import horovod.torch as hvd

        part = hvd.ProcessSet(ranks)
        hvd.init(process_sets=[part])
        return {"process_set": part}
    if kind == "torch":
        torch.distributed.init_process_group("gloo")
        return {"process_group": torch.distributed.new_group(ranks)}
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {"communicator": world.Create(world.group.Incl(ranks))}


CASES: dict[str, dict[str, Any]] = {
    "flat": {"policy": rp.IWP(0.05)},
    "hierarchical": {"policy": rp.IWP(0.05), "hierarchical": True},
    "local steps": {"policy": "iwp"},
    "scheduled": {"policy": rp.P3()},
    "auto": {"policy": "auto"},
}


def trained(comm: rp.comm.Communicator, **options: Any) -> torch.Tensor:
    model = make_model()
    rp.broadcast_parameters(model.state_dict(), comm=comm)
    optimizer = rp.DistributedOptimizer(
        nesterov(model.parameters()), model.named_parameters(), comm=comm, model=model, **options
    )
    run(model, optimizer, comm.rank, 5)
    optimizer.flush()
    optimizer.load_state_dict(optimizer.state_dict())
    assert bool(optimizer.stats()) == (comm.size > 0)
    optimizer.close()
    return weights(model)


def alone() -> torch.Tensor:
    model = make_model()
    run(model, nesterov(model.parameters()), -1, 5)
    return weights(model)


if __name__ == "__main__":
    watchdog()
    kind = sys.argv[1]
    options = group_of(kind, [0, 2])
    everybody = rp.connect(kind, timeout=30)
    outside = everybody.rank == 1
    comm = rp.connect(kind, timeout=20, **options)
    assert (comm.rank, comm.size) == ((-1, 0) if outside else (everybody.rank // 2, 2))
    for name, case in CASES.items():
        if outside:
            assert same_bytes(trained(comm, **case), alone()), name
            for refused in (lambda: comm.allreduce(torch.ones(1), name="a"), comm.divide):
                try:
                    refused()
                except rp.UsageError as error:
                    assert "not part of the group" in str(error)
                else:
                    raise AssertionError("a rank outside was let in")
        # The others begin when the rank outside is done: had it waited for one of them, all would wait.
        everybody.allreduce(torch.ones(1), name=f"done {name}").wait()
        if not outside:
            assert not same_bytes(trained(comm, **case), alone()), name
    comm.close()
    everybody.allreduce(torch.ones(1), name="end").wait()
    if everybody.rank == 0:
        print(f"{kind}: nobody was waited for", flush=True)
