"""Horovod's way to clip, with pruned tensors: in silence it took a classifier's training loss from 0.09 to 0.61."""

import logging
from collections.abc import Callable

import pytest
import torch

import ringprune as rp
from tests.training import batches, loss_of, make_model, wrap

Change = Callable[[torch.nn.Module], object]


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def told(caplog: pytest.LogCaptureFixture, policy: rp.Policy, change: Change, steps: int = 3) -> list[str]:
    """What two ranks say of ``change`` between ``synchronize()`` and ``step()``."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        for batch in batches(comm.rank, steps):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.synchronize()
            change(model)
            with optimizer.skip_synchronize():
                optimizer.step()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    return [record.getMessage() for record in caplog.records if "averages were changed" in record.getMessage()]


@pytest.mark.parametrize("policy", [rp.IWP(0.05), rp.DGC(0.05), rp.IWP(0.05, clip_norm=1.0)], ids=str)
def test_clipping_pruned_averages_is_told_once_and_says_what_to_do(
    policy: rp.Policy, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = told(caplog, policy, clip)
    assert "clip_norm=" in message and "overlap=False" in message


WARMING = rp.IWP(0.05, warmup=rp.Warmup(steps=50, start=1.0))


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0)], ids=["dense", "all of it"])
def test_clipping_whole_averages_is_as_with_horovod(policy: rp.Policy, caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, policy, clip)


def test_nothing_is_said_while_warm_up_sends_all(caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, WARMING, clip, steps=1)
    assert told(caplog, WARMING, clip, steps=3), "at a density of 0.94 and less something waits"


def test_averages_that_are_given_up_are_not_compared_with_those_of_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loop that leaves a step out, and clears gradients, changes no average of the step after it."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        for step, batch in enumerate(batches(comm.rank, 4)):
            loss_of(model, batch).backward()
            optimizer.synchronize()
            if step % 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    assert not [record for record in caplog.records if "averages" in record.getMessage()]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: [p.grad.norm() for p in model.parameters()],
        lambda model: [p.grad.clone().mul_(2) for p in model.parameters()],
    ],
    ids=["nothing", "read", "a copy"],
)
def test_averages_may_be_read(change: Change, caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, rp.IWP(0.05), change)


def test_momentum_and_the_step_itself_change_nothing_of_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    """Without a call in between, the wrapper and the wrapped optimizer are the ones who write."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05, correction="global"))
        for batch in batches(comm.rank, 3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # too late for anything

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    assert not [record for record in caplog.records if "averages" in record.getMessage()]
