"""Bugs that were found, each with its story."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from tests.training import (
    batches,
    decayed,
    loss_of,
    make_model,
    nesterov,
    run,
    same_bytes,
    sgd,
    train,
    weights,
    wrap,
)

IWP = rp.IWP(0.05)


def only(fn: Any) -> Any:
    """Run on a single rank, where everything but the network is the same."""
    return rp.simulate(1, fn)[0]


def test_unscaling_before_the_exchange_is_refused() -> None:
    """Gradients were divided by the scale twice where the exchange came after backward: 0.67 instead of 684."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(model, comm, IWP, scaler=scaler, overlap=False)
        scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(rp.UsageError, match="unscale_"):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")  # it made the next step divide by the scale

    only(rank)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("roots", [1, "all"])
def test_weights_that_are_not_finite_leave_nobody_waiting(value: float, roots: Any) -> None:
    """The roots raised on a floor that was not finite, and the others waited for their indices."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        with torch.no_grad():
            model[0].weight[0, 0] = value
        optimizer = wrap(model, comm, rp.IWP(0.05, roots=roots))
        for _ in range(2):
            optimizer.zero_grad()
            model[2].weight.sum().backward()
            optimizer.step()
        return weights(model)

    results = rp.simulate(2, rank)
    assert same_bytes(*results)


def test_an_overflow_seen_after_synchronize_skips_the_step() -> None:
    """The scaler had seen it and lowered the scale; the wrapper stepped, and the weights became infinite."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(model, comm, IWP, scaler=scaler)
        scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
        optimizer.synchronize()
        model[0].weight.grad[0, 0] = math.inf
        before = weights(model)
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert same_bytes(weights(model), before)
        assert scaler.get_scale() == 512.0
        assert optimizer.stats()["skipped_steps"] == 1
        assert optimizer.stats()["steps"] == 0

    rp.simulate(2, rank)


def test_outside_a_process_set_the_scaler_does_its_own_work() -> None:
    """The wrapper told it not to, and stepped on scaled gradients."""

    class Outside:
        def included(self) -> bool:
            return False

    model, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = rp.DistributedOptimizer(sgd(model.parameters()), process_set=Outside(), scaler=scaler)
    scaler.scale(loss_of(model, next(iter(batches(0, 1))))).backward()
    scaler.step(optimizer)
    scaler.update()
    run(plain, sgd(plain.parameters()), 0, 1)
    assert same_bytes(weights(model), weights(plain))


def test_loading_an_earlier_checkpoint_drops_momentum_made_since() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP, sgd)
        run(model, optimizer, 0, 2)
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["weight_decay"] = 0.1
        run(model, optimizer, 0, 2)
        optimizer.load_state_dict(saved)
        assert "momentum" not in optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]

    only(rank)


def test_a_checkpoint_that_is_refused_changes_nothing() -> None:
    """Momentum that it had, and this run had not, was made before it was looked at, and stepped through ever after."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        other = wrap(model, comm, IWP, decayed)
        run(model, other, 0, 2)
        saved = copy.deepcopy(other.state_dict())
        other.close()
        saved["ringprune"]["parameters"]["2.weight"]["residual"] = torch.zeros(3)
        optimizer = wrap(model, comm, IWP, sgd)
        run(model, optimizer, 0, 2)
        before = copy.deepcopy(optimizer.state_dict()["ringprune"]["parameters"])
        with pytest.raises(rp.CheckpointError, match=r"2\.weight\.residual"):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()["ringprune"]["parameters"]
        assert {name: kept.keys() for name, kept in after.items()} == {n: kept.keys() for n, kept in before.items()}
        for name, kept in before.items():
            assert all(same_bytes(tensor, after[name][kind]) for kind, tensor in kept.items())

    only(rank)


@pytest.mark.parametrize("part", ["state", "param_groups"])
def test_a_checkpoint_that_is_not_whole_is_refused(part: str) -> None:
    """A bare KeyError."""

    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP, sgd)
        saved = optimizer.state_dict()
        del saved[part]
        with pytest.raises(rp.CheckpointError, match=f"lacks {part}: save all of"):
            optimizer.load_state_dict(saved)

    only(rank)


def test_flush_is_refused_where_one_group_s_rate_is_zero() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[2].weight]}]
        optimizer = rp.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9), policy=IWP, comm=comm)
        run(model, optimizer, comm.rank, 2)
        with pytest.raises(rp.UsageError, match=r"learning rate 0.*leave it out"):
            optimizer.flush()

    rp.simulate(2, rank)


def test_float64_models_keep_float64_momentum() -> None:
    """Buffers were float32: 6.6e-10 off after 20 steps, a million times float64's rounding."""

    def loop(comm: rp.comm.Communicator | None) -> Tensor:
        model = make_model().double()
        optimizer: Any = nesterov(model.parameters())
        if comm is not None:
            optimizer = rp.DistributedOptimizer(optimizer, policy=rp.IWP(1.0), comm=comm)
        for x, y in batches(0, 20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        return weights(model)

    assert same_bytes(only(loop), loop(None))


def test_a_closed_wrapper_saves_nothing() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        optimizer.close()
        with pytest.raises(rp.UsageError, match="closed"):
            optimizer.state_dict()

    only(rank)


def test_averages_come_even_where_the_gradient_was_dropped_after_backward() -> None:
    """model.zero_grad() between backward and step met a bare assertion."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        if comm.rank == 1:
            model.zero_grad()
        optimizer.step()
        return weights(model)

    results = rp.simulate(2, rank)
    assert same_bytes(*results)
    assert not same_bytes(results[0], weights(make_model()))


def test_synchronize_without_step_discards_the_averages() -> None:
    """The next step() then complained of skip_synchronize()."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense())
        loss_of(model, next(iter(batches(comm.rank, 1, 77)))).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        run(model, optimizer, comm.rank, 3)
        return weights(model)

    expected = rp.simulate(2, lambda comm: train(comm, rp.Dense(), steps=3)[0])
    assert same_bytes(rp.simulate(2, rank)[0], expected[0])


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_parameters_that_were_not_agreed_on_are_noticed(how: str) -> None:
    """They would have been updated from each rank's own gradient, and the ranks would have drifted apart."""

    def rank(comm: rp.comm.Communicator) -> None:
        model, extra = make_model(), nn.Linear(64, 64)
        inner = sgd(model.parameters())
        extra.weight.requires_grad_(how == "added")
        if how == "thawed":
            inner.add_param_group({"params": [extra.weight]})
        optimizer = rp.DistributedOptimizer(inner, policy=IWP, comm=comm)
        run(model, optimizer, comm.rank, 1)
        if how == "added":
            inner.add_param_group({"params": [extra.weight]})
        extra.weight.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        with pytest.raises(
            rp.UsageError, match=r"shape \[64, 64\] in param group 1 requires a gradient and did not, or was not there"
        ):
            optimizer.step()

    rp.simulate(2, rank)


def test_flush_at_learning_rate_zero_is_refused() -> None:
    """A cosine schedule ends there, and all that was held back was thrown away in silence."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        run(model, optimizer, comm.rank, 2)
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(rp.UsageError, match="learning rate 0"):
            optimizer.flush()
        assert optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["residual"].any()

    rp.simulate(2, rank)


def test_momentum_from_before_wrapping_goes_on() -> None:
    """It was dropped without a word. At density 1, five plain steps and then five wrapped ones are ten plain steps."""

    def loop(comm: rp.comm.Communicator | None) -> Tensor:
        model = make_model()
        optimizer = nesterov(model.parameters())
        run(model, optimizer, 0, 5)
        if comm is not None:
            optimizer.zero_grad()
            wrapped = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=rp.IWP(1.0), comm=comm)
            run(model, wrapped, 0, 5, start=5)
            again = make_model()
            resumed = wrap(again, comm, rp.IWP(1.0), nesterov)
            resumed.load_state_dict(wrapped.state_dict())
        else:
            run(model, optimizer, 0, 5, start=5)
        return weights(model)

    assert torch.allclose(only(loop), loop(None), atol=2e-6)


def test_weight_decay_switched_on_later_survives_a_checkpoint() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP, sgd)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        run(model, optimizer, comm.rank, 2)
        other = wrap(make_model(), comm, IWP, sgd)
        other.load_state_dict(optimizer.state_dict())
        saved = other.state_dict()["ringprune"]["parameters"]["0.weight"]
        assert saved["momentum"].any()

    only(rank)


def test_a_damaged_checkpoint_entry_is_named() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        state = optimizer.state_dict()
        del state["ringprune"]["step"]
        with pytest.raises(rp.CheckpointError, match="lacks step"):
            optimizer.load_state_dict(state)
        for damage, said in ((None, "no table"), ({"0.weight": None}, "at parameter '0.weight'")):
            state = optimizer.state_dict()
            state["ringprune"]["parameters"] = damage
            with pytest.raises(rp.CheckpointError, match=said):
                optimizer.load_state_dict(state)

    only(rank)


def test_a_flush_beyond_float16_is_refused() -> None:
    """What was kept back added up to infinity, and a flush put that into the weights without a word."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = nn.Linear(64, 64, bias=False).half()
        with torch.no_grad():
            model.weight.fill_(0.001)
            model.weight[:, 0] = 100.0
        optimizer = wrap(model, comm, rp.IWP(0.01, min_numel=1, damping=0.0), lambda p: torch.optim.SGD(p, lr=1e-6))
        x = torch.full((1, 64), 0.03, dtype=torch.half)
        x[0, 0] = 1
        for _ in range(40):
            optimizer.zero_grad()
            (model(x).float() * 3000).sum().backward()
            optimizer.step()
        with pytest.raises(rp.NonFiniteGradientError, match=r"'weight' is beyond float16.*is gone"):
            optimizer.flush()
        assert model.weight.isfinite().all()
        assert model.weight.grad is None

    rp.simulate(2, rank, timeout=60)


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("flushed", [True, False])
def test_closing_gives_sgd_its_momentum_back(flushed: bool, op: str) -> None:
    """The wrapper takes it over, and closed, as the documents say to unfreeze a layer, it took it along."""

    def buffers(comm: rp.comm.Communicator, policy: rp.Policy) -> dict[str, Tensor]:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm, op=op)
        run(model, optimizer, comm.rank, 6)
        if flushed:
            optimizer.flush()
        optimizer.close()
        return {name: inner.state[p]["momentum_buffer"] for name, p in model.named_parameters() if inner.state[p]}

    usual = rp.simulate(3, lambda comm: buffers(comm, rp.Dense()), timeout=60)[0]
    for found in rp.simulate(3, lambda comm: buffers(comm, rp.IWP(1.0)), timeout=60):
        # Velocities are the same on all ranks only after a flush.
        assert found.keys() == (usual.keys() if flushed else usual.keys() - {"0.weight", "2.weight"})
        for name, buffer in found.items():
            # Sent whole, every step: the order of sums is all that differs, over six steps of three ranks.
            assert torch.allclose(buffer, usual[name], rtol=1e-4, atol=1e-6), name


def test_statistics_outlive_the_wrapper() -> None:
    """After close() they were empty, and so was what a StatsLog that was closed later wrote."""

    def rank(comm: rp.comm.Communicator) -> None:
        _, optimizer = train(comm, IWP, sgd, 3)
        before = optimizer.stats()
        optimizer.close()
        assert optimizer.stats()["bytes_sent"] == before["bytes_sent"] > 0

    rp.simulate(2, rank, timeout=60)


def test_a_checkpoint_of_the_plain_optimizer_is_seen_by_the_wrapper_at_once() -> None:
    """It had the old param groups until its next step, and learning rates set in them were lost."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = sgd(model.parameters())
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=IWP, comm=comm)
        inner.load_state_dict(inner.state_dict())
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state

    only(rank)


def test_a_second_flush_makes_no_step() -> None:
    """Nothing is left to be sent, but Adam's moments made a step of their own, and moved weights by up to 0.03."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP, lambda params: torch.optim.Adam(params, lr=0.05))
        run(model, optimizer, comm.rank, 4)
        optimizer.flush()
        once = weights(model)
        optimizer.flush()
        assert same_bytes(once, weights(model))
        run(model, optimizer, comm.rank, 1, start=4)
        moved = weights(model)
        optimizer.flush()
        assert not same_bytes(moved, weights(model)), "what a step keeps back is sent again"

    rp.simulate(2, rank, timeout=60)


def test_a_second_flush_exchanges_what_ranks_have_done_since() -> None:
    """With local steps ranks may have made different numbers of them: one without any left the others waiting."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.5, local_steps=8))
        run(model, optimizer, comm.rank, 3 - comm.rank)
        optimizer.flush()
        run(model, optimizer, comm.rank, comm.rank, start=3)
        optimizer.flush()
        return weights(model)

    first, second = rp.simulate(2, rank, timeout=60)
    assert same_bytes(first, second)


def test_an_optimizer_that_replaces_its_groups_by_itself_is_followed() -> None:
    """Some load a state without torch's hooks: a scheduler of the wrapper then set rates that nobody used."""

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.param_groups = [dict(group) for group in self.param_groups]

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = Own(model.parameters(), lr=0.1)
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=IWP, comm=comm)
        run(model, optimizer, comm.rank, 1)
        inner.load_state_dict({})
        run(model, optimizer, comm.rank, 1)
        assert optimizer.param_groups is inner.param_groups

    only(rank)
