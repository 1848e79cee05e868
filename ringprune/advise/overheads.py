"""Measures what collectives and tensors cost the program, in some seconds."""

from collections.abc import Sequence
from functools import partial

import torch

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.probing.speeds import seconds_of

__all__ = ["overheads"]

TENSORS, STEPS = 32, 25


def overheads(*, together: bool = False) -> tuple[float, float]:
    """Seconds per collective and per tensor: steps on one simulated rank that has next to nothing to exchange.

    Args:
        together: as for :func:`ringprune.probing.speeds.seconds_of`.
    """
    one, apart = (rp.simulate(1, partial(_steps, size, together))[0] for size in (4 * TENSORS, 4))
    message = max(0.0, (apart - one) / (TENSORS - 1))
    return message, max(0.0, (one - 2 * message) / TENSORS)


def _steps(bucket_bytes: int, together: bool, comm: Communicator) -> float:
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
    exchanging, alone = seconds_of(
        STEPS, partial(_step, optimizer, params), partial(_step, plain, others), together=together
    )
    optimizer.close()
    return exchanging - alone


def _step(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> None:
    loss = torch.cat(list(params)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
