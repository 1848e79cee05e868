"""A flush at the learning rate of the training is one oversized step: it took a third of the accuracy, in silence."""

import logging

import pytest
import torch

import ringprune as rp
from tests.training import make_model, run, wrap


def told(caplog: pytest.LogCaptureFixture, policy: rp.Policy, factor: float | None) -> list[str]:
    """What two ranks say of a flush after three steps; ``factor`` is what a schedule has made of the rate by then."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        if factor is not None:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor if step else 1.0)
        run(model, optimizer, comm.rank, 3)
        if factor is not None:
            schedule.step()
        optimizer.flush()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("flush()")]


@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_rank_0_warns_where_the_rate_is_high(factor: float | None, caplog: pytest.LogCaptureFixture) -> None:
    messages = told(caplog, rp.IWP(0.05), factor)
    assert len(messages) == 1
    assert f"at learning rate {0.05 * (factor or 1.0):g}." in messages[0]


def test_nobody_warns_where_the_rate_has_fallen(caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, rp.IWP(0.05), 0.1)


@pytest.mark.parametrize("rate", [0.05, 1], ids=str)
def test_a_rate_that_the_loop_has_lowered_itself_has_fallen(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    """Without a schedule of torch nobody knew what the rate had been."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        for group in optimizer.param_groups:
            group["lr"] = rate
        run(model, optimizer, comm.rank, 2)
        for group in optimizer.param_groups:
            group["lr"] *= 0.01
        optimizer.flush()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    assert not [record for record in caplog.records if record.getMessage().startswith("flush()")]


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05, local_steps=2)], ids=["dense", "local steps"])
def test_nobody_warns_of_what_is_no_step(policy: rp.Policy, caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, policy, None)


def test_a_rate_that_fell_before_a_resume_has_fallen(caplog: pytest.LogCaptureFixture) -> None:
    """The highest rate was forgotten: the loop that had lowered it was warned after every resume."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 2)
        for group in optimizer.param_groups:
            group["lr"] *= 0.01
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = optimizer.state_dict()
        again = make_model()
        again.load_state_dict(weights)
        resumed = wrap(again, comm, rp.IWP(0.05))
        resumed.load_state_dict(state)
        run(again, resumed, comm.rank, 2)
        resumed.flush()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    assert not [record for record in caplog.records if record.getMessage().startswith("flush()")]
