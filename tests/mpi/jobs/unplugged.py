"""A job that trains while somebody pulls a cable. Arguments: a folder, steps, seconds that a rank may wait.

Rank 0 keeps the number of steps made in ``steps``; each rank writes a hash of its weights, or its error, into
``rank N``.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

import ringprune as rp
from tests.mpi.inside import start


def train(comm: rp.comm.Communicator, folder: Path, steps: int) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.ReLU(), torch.nn.Linear(500, 500))
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        policy=rp.IWP(0.05, values="bf16"),
        comm=comm,
        bucket_bytes=1_000_000,
    )
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 500, generator=generator)).square().mean().backward()
        optimizer.step()
        if comm.rank == 0:
            (folder / "steps").write_text(str(step + 1))
        time.sleep(0.02)  # so that the cable is pulled in the middle
    data = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    folder, steps, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    comm = start("mpi", timeout)
    try:
        outcome = train(comm, folder, steps)
    except rp.CommunicatorError as error:
        outcome = f"error: {error}"
    (folder / f"rank {comm.rank}").write_text(outcome)
    if outcome.startswith("error"):
        # The first to end takes the others along: mpirun ends them, maybe before they have waited their time.
        limit = time.monotonic() + 20
        while len(list(folder.glob("rank *"))) < comm.size and time.monotonic() < limit:
            time.sleep(0.01)
        os._exit(1)  # MPI cannot be shut down in order: a host is out of reach


if __name__ == "__main__":
    main()
