"""A job that trains with ``policy="auto"`` over the communicator named on its command line: ranks change together."""

import sys
from typing import Any

import torch

import ringprune as rp
from tests.mpi.inside import check_together, start
from tests.training import make_model, nesterov, run, weights, wrap

STEPS = 80


def trains(comm: rp.comm.Communicator, policy: Any) -> None:
    """Weights stay equal, whatever is measured; and something is."""
    model = make_model()
    optimizer = wrap(model, comm, policy, nesterov, check_every=1)
    for step in range(STEPS):
        run(model, optimizer, comm.rank, 1, start=step)
    found = optimizer.stats()["auto"]
    assert not found["deciding"], "it settles"
    assert found["said"], "it says why"
    assert len(found["predicted_seconds"]) > 1
    assert found["link_bytes_per_second"] > 0
    own = weights(model)
    rows = comm.allgather(own, name="weights").wait().view(comm.size, -1)
    assert bool((rows == rows[0]).all())
    assert bool(torch.isfinite(own).all())
    optimizer.close()


CANDIDATES = rp.Auto((rp.IWP(0.05, values="int8", dense_values="bf16"), rp.Dense(), rp.IWP(0.05)), margin=0.0)


if __name__ == "__main__":
    comm = start(sys.argv[1])
    checks = {
        "defaults": lambda: trains(comm, "auto"),
        "a packed policy first": lambda: trains(comm, CANDIDATES),
    }
    for name, check in checks.items():
        check_together(sys.argv[1], name, check)
    comm.close()
    if comm.rank == 0:
        print(f"{len(checks)} checks passed on {comm.size} ranks", flush=True)
