"""Who looks at parameters in the middle of an exchange of local steps, as a signal's handler may, finds weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.errors import CommunicatorError, UsageError


def made(comm: Communicator) -> tuple[nn.Module, rp.DistributedOptimizer]:
    """A model whose weights are all 0.5, and gradients that take them to about 0.3 or 0.4."""
    model = nn.Linear(40, 60)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    optimizer = rp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        policy=rp.IWP(0.1, min_numel=1, local_steps=1),
        comm=comm,
    )
    model(torch.ones(2, 40)).sum().backward()
    return model, optimizer


def amid(comm: Communicator, look: Callable[[], None]) -> None:
    """Have ``look`` called at each allreduce from now on."""
    allreduce = comm.allreduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        look()
        return allreduce(*args, **kwargs)

    comm.allreduce = watched


def test_parameters_are_weights_at_all_times() -> None:
    """For once they held what they had moved by: a checkpoint that a handler of SIGTERM saved there was worthless."""

    def rank(comm: Communicator) -> None:
        model, optimizer = made(comm)
        seen: list[float] = []
        amid(comm, lambda: seen.extend(float(param.detach().min()) for param in model.parameters()))
        optimizer.step()
        assert seen
        assert all(0.25 < least < 0.55 for least in seen), seen

    rp.simulate(2, rank)


def test_shared_weights_are_refused_there() -> None:
    """They are being made: what is entered there would take this rank's own weights for them."""

    def rank(comm: Communicator) -> None:
        model, optimizer = made(comm)
        asked: list[str] = []

        def handler() -> None:
            with pytest.raises(UsageError, match="set a flag"), optimizer.shared_weights():
                asked.append("entered")
            asked.append("refused")

        amid(comm, handler)
        optimizer.step()
        assert set(asked) == {"refused"}
        with optimizer.shared_weights():
            assert all(bool((param > 0.25).all()) for param in model.parameters())

    rp.simulate(2, rank)


def test_parameters_are_the_shared_weights_where_it_breaks_off() -> None:
    def rank(comm: Communicator) -> None:
        model, optimizer = made(comm)
        optimizer.step()
        before = [param.detach().clone() for param in model.parameters()]

        def unplugged() -> None:
            raise CommunicatorError("unplugged")

        amid(comm, unplugged)
        model(torch.ones(2, 40)).sum().backward()
        with pytest.raises(CommunicatorError, match="unplugged"):
            optimizer.step()
        for param, weight in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, weight)

    rp.simulate(2, rank)
