"""Measures what collectives and tensors cost the program, in some seconds."""

from collections.abc import Sequence
from functools import partial

import torch

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.probing.speeds import seconds_of

__all__ = ["overheads"]

TENSORS, STEPS = 32, 25


def overheads() -> tuple[float, float]:
    """Seconds per collective and per tensor: steps on one simulated rank that has next to nothing to exchange."""
    together, apart = (rp.simulate(1, partial(_steps, bytes_of_bucket))[0] for bytes_of_bucket in (4 * TENSORS, 4))
    message = max(0.0, (apart - together) / (TENSORS - 1))
    return message, max(0.0, (together - 2 * message) / TENSORS)


def _steps(bucket_bytes: int, comm: Communicator) -> float:
    """Median seconds of hooks and step on ``TENSORS`` tensors of one entry, less those of a step without exchange."""
    params = [torch.nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(TENSORS)]
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.0),
        [(str(i), p) for i, p in enumerate(params)],
        policy=rp.Dense(),
        comm=comm,
        bucket_bytes=bucket_bytes,
    )
    others = [torch.nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(TENSORS)]
    plain = torch.optim.SGD(others, lr=0.0)
    exchanging, alone = seconds_of(STEPS, partial(_step, optimizer, params), partial(_step, plain, others))
    optimizer.close()
    return exchanging - alone


def _step(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> None:
    loss = torch.cat(list(params)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
