"""bench_exchange.py on a model small enough for a test; in a job with ``--peer`` first: dense exchanges average.

Started outside of a job it starts itself as the ranks of jobs, as bench_exchange.py does.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.mpi.inside import watchdog

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "mpi_scripts"), str(ROOT / "examples")]

SIZES = (48, 96, 10)


def tiny() -> nn.Module:
    """4,704 + 970 entries: a matrix that travels packed, and small tensors."""
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Linear(SIZES[1], SIZES[2]))


def by_mpi(gradients: Mapping[str, Tensor], ranks: "object") -> None:
    """An outside exchange: plain allreduces of MPI."""
    from mpi4py import MPI

    for gradient in gradients.values():
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())
        gradient.div_(ranks.size)


def check_averages(methods: tuple[str, ...]) -> None:
    """After two steps of each method every gradient is the mean of what the ranks have drawn."""
    from exchanges.choice import Choice
    from exchanges.gradients import Gradients
    from exchanges.job import current_job
    from exchanges.methods import METHODS
    from models import shapes

    job = current_job()
    parameters = shapes("tiny")
    for name in methods:
        module = Gradients(parameters, seed=3, rank=job.rank)
        everyone = [Gradients(parameters, seed=3, rank=rank) for rank in range(job.size)]
        exchange = METHODS[name].build(job, module, Choice("tiny", name, peer="tests.mpi.jobs.exchange:by_mpi"))
        for _ in range(2):
            for each in [module, *everyone]:
                each.draw()
            for each in everyone:
                each().backward()
            exchange.run(exchange.prepare())
            for parameter, *drawn in zip(module.parameters(), *(each.parameters() for each in everyone), strict=True):
                mean = torch.stack([other.grad for other in drawn]).mean(dim=0)
                torch.testing.assert_close(parameter.grad, mean)
        exchange.close()
    if job.rank == 0:
        print(f"{len(methods)} dense exchanges average on {job.size} ranks", flush=True)


def main() -> None:
    """Check, then measure with the arguments given."""
    import bench_exchange
    from exchanges.job import started_by
    from models import PUBLISHED

    PUBLISHED["tiny"] = tiny
    if started_by(os.environ) == "mpi" and "--peer" in sys.argv:
        check_averages(("horovod-fp32", "gloo-fp32", "ringprune:dense", "peer"))
    sys.exit(bench_exchange.main(sys.argv[1:]))


if __name__ == "__main__":
    watchdog()
    main()
