"""Loss scaling and clipping: what reaches the residual, and who skips."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from tests.training import FailingSGD, batches, loss_of, make_model, nesterov, same_bytes, train, weights, wrap

IWP = rp.IWP(0.05)


def only(fn: Any) -> Any:
    """Run on a single rank, where everything but the network is the same."""
    return rp.simulate(1, fn)[0]


# -- loss scaling ------------------------------------------------------------------------------------------------------


def scaled_loop(comm: rp.comm.Communicator, policy: rp.Policy, clip: bool, bad: set[int], **options: Any) -> Any:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    optimizer = wrap(model, comm, policy, nesterov, scaler=scaler, **options)
    for step, batch in enumerate(batches(comm.rank, 6)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (math.inf if step in bad and comm.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale(), optimizer.stats()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_a_power_of_two_scale_changes_no_bits(policy: rp.Policy, overlap: bool, clip: bool) -> None:
    expected = rp.simulate(2, lambda comm: train(comm, policy, nesterov, 6)[0])
    got = rp.simulate(2, lambda comm: scaled_loop(comm, policy, clip, set(), overlap=overlap))
    assert same_bytes(got[0][0], expected[0]) and got[0][1] == 1024.0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_an_overflow_on_one_rank_skips_the_step_and_lowers_the_scale_on_all(
    policy: rp.Policy, overlap: bool, clip: bool
) -> None:
    results = rp.simulate(2, lambda comm: scaled_loop(comm, policy, clip, {0, 3}, overlap=overlap))
    for _, scale, stats in results:
        assert scale == 256.0 and stats["skipped_steps"] == 2 and stats["steps"] == 4
    assert same_bytes(results[0][0], results[1][0]) and results[0][0].isfinite().all()


def test_residuals_are_in_unscaled_units_when_the_scale_changes() -> None:
    """Halving the scale between two steps must not change what the residual means."""

    def rank(comm: rp.comm.Communicator, scales: list[float]) -> Tensor:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
        optimizer = wrap(model, comm, IWP, nesterov, scaler=scaler)
        for scale, batch in zip(scales, batches(comm.rank, len(scales)), strict=True):
            scaler.update(scale) if scale != scaler.get_scale() else None
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    steady = rp.simulate(2, lambda comm: rank(comm, [64.0, 64.0, 64.0, 64.0]))
    moving = rp.simulate(2, lambda comm: rank(comm, [64.0, 32.0, 4096.0, 2.0]))
    assert same_bytes(steady[0], moving[0])


@pytest.mark.parametrize("scale", [2.0**-128, 0.0])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", [rp.Dense(), IWP])
def test_a_scale_that_nothing_can_be_divided_by_is_told(policy: rp.Policy, overlap: bool, scale: float) -> None:
    """After 144 skipped steps in a row an internal error named neither scaler nor scale, or it was a division by 0.

    And then the checkpoint that the error names could not be loaded, or a bucket had been lost.
    """

    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = wrap(model, comm, policy, nesterov, scaler=scaler, overlap=overlap)
        saved = deepcopy(optimizer.state_dict())
        with pytest.raises(rp.NonFiniteGradientError, match=r"scale has fallen to .*training has diverged"):
            step(model, optimizer, scaler, comm.rank)
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        scaler.update(1024.0)
        for _ in range(2):
            step(model, optimizer, scaler, comm.rank)
            optimizer.zero_grad()
        return weights(model)

    def step(model: nn.Module, optimizer: rp.DistributedOptimizer, scaler: torch.amp.GradScaler, number: int) -> None:
        scaler.scale(loss_of(model, next(iter(batches(number, 1))))).backward()
        scaler.step(optimizer)
        scaler.update()

    every = rp.simulate(2, rank)
    assert same_bytes(*every)
    assert not same_bytes(every[0], weights(make_model()))


def test_after_an_error_of_the_optimizer_a_plain_step_is_one() -> None:
    """What GradScaler.step had left in the optimizer stayed: the next step took itself for one of the scaler's."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        inner = FailingSGD(model.parameters(), lr=0.1)
        inner.error = MemoryError("made up")
        optimizer = rp.DistributedOptimizer(inner, comm=comm, policy=rp.Dense(), scaler=scaler)
        scaler.scale(loss_of(model, next(iter(batches(comm.rank, 1))))).backward()
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")

    only(rank)


def test_a_disabled_scaler_is_no_scaler() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = wrap(model, comm, IWP, scaler=scaler)
        for batch in batches(0, 3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    assert same_bytes(only(rank), only(lambda comm: train(comm, IWP, steps=3)[0]))


def test_a_scaler_that_was_not_given_is_noticed() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = wrap(model, comm, IWP)
        scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
        with pytest.raises(rp.UsageError, match="scaler="):
            scaler.step(optimizer)

    only(rank)


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_clipping_bounds_what_a_rank_contributes(size: int) -> None:
    bound = 0.01

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, policy, lambda p: torch.optim.SGD(p, lr=1.0))
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        raw = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return [torch.stack([g.norm() for g in raw]), torch.stack([p.grad.norm() for p in model.parameters()])]

    local = bound / math.sqrt(size)
    for raw, sent in rp.simulate(size, lambda comm: rank(comm, rp.IWP(1.0, clip_norm_per_tensor=bound))):
        assert (raw > local).all() and (sent <= local * (1 + 1e-5)).all()
    for raw, sent in rp.simulate(size, lambda comm: rank(comm, rp.IWP(1.0, clip_norm=bound))):
        assert raw.norm() > local and sent.norm() <= local * (1 + 1e-5)
    if size == 1:
        assert sent.norm() == pytest.approx(local, rel=1e-5)
