"""Update mode: local steps of any optimizer, then an exchange of what they moved the weights by."""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from tests.training import (
    OPTIMIZERS,
    FailingSGD,
    batches,
    loss_of,
    make_model,
    run,
    same_bytes,
    sgd,
    weights,
    wrap,
)

EPS = torch.finfo(torch.float32).eps
H = 3
POLICIES = {
    "iwp": rp.IWP(0.05, roots="all", local_steps=H),
    "one root": rp.IWP(0.05, local_steps=H, explore=0.5, warmup=rp.Warmup(3)),
    "8 bits": rp.IWP(0.05, roots="all", values="int8", dense_values="int8", local_steps=H),
    "look-ahead": rp.IWP(0.05, roots="all", lookahead=True, local_steps=H),
    "ring": rp.IWP(0.05, reduction="ring", local_steps=H),
    "outer momentum": rp.IWP(0.2, local_steps=rp.LocalSteps(H, outer_lr=0.7, outer_momentum=0.5)),
    "heavy ball": rp.IWP(0.2, local_steps=rp.LocalSteps(H, outer_momentum=0.5, nesterov=False)),
    "dense": rp.Dense(local_steps=H),
    "dense in 16 bits": rp.Dense("bf16", local_steps=H),
    "random": rp.RandomK(0.05, local_steps=H),
    "own sets": rp.DGC(0.05, local_steps=H),
    "balanced": rp.OkTopk(0.05, values="bf16", local_steps=H),
    "low-pass": rp.ScaleCom(0.05, local_steps=H),
    "core and explored": rp.SlimDP(0.05, refresh=2, local_steps=H),
    "books": rp.IWP(0.1, roots="all", values="book2", dense_values="book4", local_steps=H),
    "relevance, estimate, turns": rp.MIPD(0.05, local_steps=H),
    "clipped": rp.IWP(0.05, clip_norm=0.1, local_steps=1),
    "shared momentum": rp.IWP(0.05, roots="all", local_steps=rp.LocalSteps(H, momentum="shared")),
    "growing": rp.IWP(0.05, roots="all", local_steps=rp.LocalSteps(H, growth=2.0)),
    "shared momentum, own sets": rp.DGC(0.05, local_steps=rp.LocalSteps(H, momentum="shared")),
}


def rate_one(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def shared(model: nn.Module, optimizer: rp.DistributedOptimizer) -> Tensor:
    """The weights that all ranks share."""
    with optimizer.shared_weights():
        return weights(model)


# -- the laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "policy", ["iwp", "one root", "8 bits", "ring", "random", "balanced", "core and explored", "books"]
)
def test_what_is_sent_and_what_is_kept_is_what_the_weights_moved_by(size: int, policy: str) -> None:
    """Law 1: at rate 1 a rank's weights move by the sum of its gradients, which is sent or kept."""
    steps, name = 4 * H, "0.weight"

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], rate_one)
        layer = model.get_parameter(name)
        before, moved, bulk = layer.detach().double(), torch.zeros(1).double(), torch.zeros(1).double()
        for batch in batches(comm.rank, steps):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            moved = moved + layer.grad.double()
            bulk = bulk + layer.grad.double().abs() + layer.detach().double().abs()
            optimizer.step()
        kept = optimizer.state_dict()["ringprune"]["parameters"][name]["residual"].double()
        return moved - kept, bulk, before - layer.detach().double()

    results = rp.simulate(size, rank)
    gone = results[0][2]  # what the shared weights moved by, the same on all ranks
    # Every local step and exchange rounds its weight, the residual and the sum over ranks by EPS/2 of their size each.
    bound = EPS * (size + 4) * sum(r[1] for r in results)
    assert ((sum(r[0] for r in results) - size * gone).abs() <= bound).all()
    assert gone.abs().max() > 0


def local_sgd(comm: rp.comm.Communicator, make: Any, steps: int) -> tuple[Tensor, float]:
    """Local steps and the plain average of the ranks' weights, by hand; and the largest weight seen."""
    model, largest = make_model(), 0.0
    optimizer = make(model.parameters())
    for number, batch in enumerate(batches(comm.rank, steps), 1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if number % H == 0:
            for name, param in model.named_parameters():
                comm.allreduce(param.data, name=name).wait()
                param.data.mul_(1 / comm.size)
        largest = max(largest, float(weights(model).abs().max()))
    return weights(model), largest


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", [rp.IWP(1.0, local_steps=H), rp.Dense(local_steps=H)], ids=lambda p: p.name)
def test_at_density_one_an_exchange_is_the_average_of_the_weights(size: int, name: str, policy: rp.Policy) -> None:
    """Law 2. The mean is made of differences to the shared weights: (P + 4) roundings of a weight at each exchange.

    The loss is convex enough at these rates not to amplify them more than twofold; AdamW's step is a Lipschitz function
    of the gradient with constant lr / eps = 1, so that it adds the error of a gradient, some tens of the weights'.
    """
    steps, make = 8 * H, OPTIMIZERS[name]
    expected = rp.simulate(size, lambda comm: local_sgd(comm, make, steps))

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        run(model, wrap(model, comm, policy, make), comm.rank, steps)
        return weights(model)

    got = rp.simulate(size, rank)
    amplified = 2 * (32 if name == "adamw" else 1)
    bound = amplified * (steps // H) * (size + 4) * EPS * expected[0][1]
    assert (got[0] - expected[0][0]).abs().max() <= bound


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_shared_weights_are_the_same_bytes_on_every_rank_at_every_step(size: int, policy: str) -> None:
    """Law 3; between exchanges the ranks' own weights differ, and an exchange makes them the shared ones."""

    def rank(comm: rp.comm.Communicator) -> list[tuple[Tensor, Tensor]]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], bucket_bytes=20_000)
        history = []
        for batch in batches(comm.rank, 2 * H + 1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            history.append((shared(model, optimizer), weights(model)))
        return history

    histories = rp.simulate(size, rank)
    for number, steps in enumerate(zip(*histories, strict=True), 1):
        assert all(same_bytes(common, steps[0][0]) for common, _ in steps)
        exchanged = number % H == 0 or policy == "clipped"
        assert all(same_bytes(common, own) == exchanged for common, own in steps)
    assert not same_bytes(histories[0][0][0], histories[0][-1][0])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_is_attributed_and_dense_bytes_are_those_of_all_steps(policy: str) -> None:
    """Law 4: what the communicator counted is told; a dense allreduce at each of the H steps is what it compares to."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy])
        start = comm.traffic.bytes_sent
        run(model, optimizer, comm.rank, 2 * H)
        optimizer.flush()
        stats = optimizer.stats()
        assert stats["bytes_sent"] == pytest.approx(comm.traffic.bytes_sent - start, rel=1e-12)
        assert stats["dense_equivalent_bytes"] == pytest.approx(2 * H * 2 * 2 / 3 * 4 * weights(model).numel())
        assert stats["steps"] == 2 * H

    rp.simulate(3, rank)


def test_local_steps_divide_the_bytes() -> None:
    def sent(policy: rp.Policy, steps: int) -> float:
        def rank(comm: rp.comm.Communicator) -> float:
            model = make_model()
            optimizer = wrap(model, comm, policy)
            run(model, optimizer, comm.rank, steps)
            stats = optimizer.stats()
            return float(stats["bytes_sent"] - stats["bytes_headers"])

        return rp.simulate(2, rank)[0]

    assert sent(rp.IWP(0.05, local_steps=4), 8) == pytest.approx(sent(rp.IWP(0.05), 2))


@pytest.mark.parametrize("per_node", [None, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [2 * H, 2 * H + 1])
def test_resuming_between_and_within_intervals_is_the_same_as_not_stopping(
    policy: str, name: str, stop: int, per_node: int | None
) -> None:
    """Law 6. The model's checkpoint is rank 0's, as most scripts save it: the optimizer's holds each rank's own."""
    make, steps, hierarchical = OPTIMIZERS[name], 4 * H + 2, per_node is not None

    def straight(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], make, hierarchical=hierarchical)
        run(model, optimizer, comm.rank, steps)
        return torch.cat([weights(model), shared(model, optimizer)])

    def first(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], make, hierarchical=hierarchical)
        run(model, optimizer, comm.rank, stop)
        with optimizer.shared_weights():
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    saved = rp.simulate(3, first, ranks_per_node=per_node)

    def second(comm: rp.comm.Communicator) -> Tensor:
        model = make_model(seed=5)
        optimizer = wrap(model, comm, POLICIES[policy], make, hierarchical=hierarchical)
        model.load_state_dict(saved[0]["model"])
        optimizer.load_state_dict(saved[comm.rank]["optimizer"])
        run(model, optimizer, comm.rank, steps - stop, start=stop)
        return torch.cat([weights(model), shared(model, optimizer)])

    expected, got = (rp.simulate(3, rank, ranks_per_node=per_node) for rank in (straight, second))
    assert all(same_bytes(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("policy", ["iwp", "8 bits", "dense", "own sets", "look-ahead", "core and explored"])
def test_flush_leaves_nothing_behind_whatever_the_ranks_have_done(policy: str) -> None:
    """Ranks stop at different numbers of steps; the flushed weights hold what all of them have done."""
    name = "0.weight"

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], rate_one)
        layer = model.get_parameter(name)
        before, moved, bulk = layer.detach().double(), torch.zeros(1).double(), torch.zeros(1).double()
        for batch in batches(comm.rank, H + comm.rank):  # rank 0 flushes between intervals, the others within
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            moved = moved + layer.grad.double()
            bulk = bulk + layer.grad.double().abs() + layer.detach().double().abs()
            optimizer.step()
        optimizer.flush()
        state = optimizer.state_dict()["ringprune"]
        assert state["local_steps"] == 0 and state["flushed"] and same_bytes(weights(model), shared(model, optimizer))
        packed = [state["parameters"][name] for name in ("0.weight", "2.weight")]
        assert not any(entry["residual"].any() for entry in packed if "residual" in entry)
        return moved, bulk, before - layer.detach().double(), state

    results = rp.simulate(3, rank)
    for *_, state in results[1:]:
        for param, entry in state["parameters"].items():
            for kind, tensor in entry.items():
                assert same_bytes(tensor, results[0][3]["parameters"][param][kind]), (param, kind)
    bound = EPS * (3 + 4) * sum(r[1] for r in results)
    assert ((sum(r[0] for r in results) - 3 * results[0][2]).abs() <= bound).all()


# -- one rank's trouble -----------------------------------------------------------------------------------------------


def with_bad_gradient(comm: rp.comm.Communicator, at: int, **options: Any) -> tuple[nn.Module, rp.DistributedOptimizer]:
    """Train H steps, then H more of which the last rank's step ``at`` has a NaN."""
    model = make_model()
    optimizer = wrap(model, comm, POLICIES["iwp"], **options)
    run(model, optimizer, comm.rank, H)
    for number, batch in enumerate(batches(comm.rank, H, start=H)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number == at and comm.rank == comm.size - 1:
            model.get_parameter("2.weight").grad[0, 0] = math.nan
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("at", range(H))
def test_a_bad_gradient_raises_at_the_next_exchange_on_all_ranks(at: int) -> None:
    """Law 7: the interval is lost on all of them, and training can go on from the weights before it."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        with pytest.raises(
            rp.NonFiniteGradientError, match=r"rank 2: the gradient of '2\.weight' has 1 of 3072 entries"
        ):
            with_bad_gradient(comm, at)
        return torch.zeros(1)

    rp.simulate(3, rank)

    def goes_on(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"], lambda params: torch.optim.SGD(params, lr=0.05))
        run(model, optimizer, comm.rank, H)
        before = weights(model)
        optimizer.zero_grad()
        for number in range(H):
            loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
            if comm.rank == 0:
                model.get_parameter("0.bias").grad[0] = math.inf
            if number < H - 1:
                optimizer.step()
        with pytest.raises(rp.NonFiniteGradientError):
            optimizer.step()
        assert same_bytes(weights(model), before)
        run(model, optimizer, comm.rank, H, start=H)
        return weights(model), before

    for after, before in rp.simulate(2, goes_on):
        assert torch.isfinite(after).all() and not same_bytes(after, before)


def test_a_skipped_local_step_is_the_rank_s_own() -> None:
    """With nonfinite="skip" the others' steps, and its other steps, count; its bad one is left out."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, int]:
        model, optimizer = with_bad_gradient(comm, 1, nonfinite="skip")
        return weights(model), optimizer.stats()["skipped_steps"]

    results = rp.simulate(3, rank)
    assert [skipped for _, skipped in results] == [0, 0, 1]
    assert torch.isfinite(results[0][0]).all() and all(same_bytes(w, results[0][0]) for w, _ in results)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_weights_that_overflow_raise_on_all_ranks(nonfinite: str) -> None:
    """Gradients are finite, the step is not. To skip such an exchange once was to skip all that followed, unseen."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"], rate_one, nonfinite=nonfinite)
        run(model, optimizer, comm.rank, H)
        before = weights(model)
        run(model, optimizer, comm.rank, H - 1, start=H)
        optimizer.zero_grad()
        loss_of(model, next(iter(batches(comm.rank, 1)))).backward()
        if comm.rank == 0:
            optimizer.param_groups[0]["lr"] = 1e38
            model.get_parameter("4.bias").grad.fill_(1e30)
        with pytest.raises(rp.NonFiniteGradientError, match=r"rank 0: the weight of '4\.bias'"):
            optimizer.step()
        assert same_bytes(weights(model), before)

    rp.simulate(2, rank)


def test_no_gradient_in_a_whole_interval_is_an_error_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"])
        for _ in range(H - 1):
            optimizer.step()
        with pytest.raises(rp.UsageError, match="step\\(\\) or synchronize\\(\\) before backward"):
            optimizer.step()

    rp.simulate(2, rank)


# -- with the rest of a training loop ---------------------------------------------------------------------------------


def test_schedulers_and_clipping_act_on_local_steps() -> None:
    """As in a loop without RingPrune: clip between backward and step, schedule after the step."""

    def loop(model: nn.Module, optimizer: Any, wrapped: torch.optim.Optimizer, rank: int) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(wrapped, step_size=2, gamma=0.5)
        for batch in batches(rank, H - 1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()  # as a script for Horovod does
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()

    def rank(comm: rp.comm.Communicator) -> None:
        plain, model = make_model(), make_model()
        optimizer = sgd(plain.parameters())
        loop(plain, optimizer, optimizer, comm.rank)
        ours = wrap(model, comm, POLICIES["iwp"])
        loop(model, ours, ours, comm.rank)
        assert same_bytes(weights(model), weights(plain))

    rp.simulate(2, rank)


def test_a_backward_pass_can_be_thrown_away() -> None:
    """zero_grad() between backward and step is an error where gradients have left; here they have not."""

    def rank(comm: rp.comm.Communicator) -> None:
        model, same = make_model(), make_model()
        first, second = wrap(model, comm, POLICIES["iwp"]), wrap(same, comm, POLICIES["iwp"])
        loss_of(model, next(iter(batches(comm.rank, 1, 99)))).backward()
        first.zero_grad()
        for each, optimizer in ((model, first), (same, second)):
            run(each, optimizer, comm.rank, H)
        assert same_bytes(weights(model), weights(same))

    rp.simulate(2, rank)


def test_clip_norm_bounds_a_rank_s_own_step() -> None:
    """The bound is not divided by sqrt(ranks): what is clipped is a local step, no part of a sum."""

    def rank(comm: rp.comm.Communicator) -> None:
        plain, model = make_model(), make_model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        loss_of(plain, next(iter(batches(comm.rank, 1)))).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        run(model, wrap(model, comm, rp.IWP(0.05, clip_norm=0.05, local_steps=2), rate_one), comm.rank, 1)
        assert torch.allclose(weights(model), weights(plain), rtol=0, atol=4 * EPS)

    rp.simulate(4, rank)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_is_each_rank_s_own(unscaled: bool, given: bool) -> None:
    """An overflow on one rank lowers its own scale and leaves its own step out; all ranks still exchange together."""

    def rank(comm: rp.comm.Communicator) -> tuple[float, Tensor, int]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"scaler": scaler} if given else {}
        optimizer = wrap(model, comm, rp.IWP(1.0, local_steps=H), rate_one, **options)
        for number, batch in enumerate(batches(comm.rank, H)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if comm.rank == 1 and number == 1:
                model.get_parameter("0.bias").grad[0] = math.inf
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), weights(model), optimizer.stats()["skipped_steps"]

    def by_hand(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = rate_one(model.parameters())
        for number, batch in enumerate(batches(comm.rank, H)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if (comm.rank, number) != (1, 1):
                optimizer.step()
        mean = weights(model)
        comm.allreduce(mean, name="mean").wait()
        return mean / comm.size

    results, expected = rp.simulate(2, rank), rp.simulate(2, by_hand)[0]
    assert [(scale, skipped) for scale, _, skipped in results] == [(1024.0, 0), (512.0, 1)]
    # Powers of two scale without error; what rounds is the exchange: (P + 4) roundings of a weight below 4.
    assert all((w - expected).abs().max() <= 2 * (2 + 4) * 4 * EPS for _, w, _ in results)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.first(x)).tanh())
        return found


def test_batch_norm_statistics_are_averaged_at_each_exchange() -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        model = Normed()
        for param in model.parameters():
            param.data.fill_(0.01)
        optimizer = rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=POLICIES["iwp"], comm=comm, model=model
        )
        seen = []
        for batch in batches(comm.rank, H):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            seen.append(model.norm.running_mean.clone())
            optimizer.step()
        exchanged = model.norm.running_mean.clone()
        loss_of(model, next(iter(batches(comm.rank, 1, H)))).backward()  # moves this rank's statistics
        assert not same_bytes(model.norm.running_mean, exchanged)
        optimizer.step()
        with optimizer.shared_weights():
            assert same_bytes(model.norm.running_mean, exchanged)
        own = model.norm.running_mean.clone()
        state = optimizer.state_dict()
        model.norm.reset_running_stats()
        optimizer.zero_grad()
        optimizer.load_state_dict(state)
        assert same_bytes(model.norm.running_mean, own)
        return seen[-1], exchanged, own

    results = rp.simulate(2, rank)
    mean = (results[0][0] + results[1][0]) / 2
    for _, exchanged, _ in results:
        assert (exchanged - mean).abs().max() <= 2 * EPS * mean.abs().max()
    assert not same_bytes(results[0][2], results[1][2])


def test_weights_broadcast_or_changed_between_intervals_are_where_the_next_one_starts() -> None:
    """Scripts wrap first and broadcast the weights afterwards; later some prune, clamp or load weights."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model(seed=comm.rank)
        optimizer = wrap(model, comm, rp.IWP(1.0, local_steps=H), rate_one)
        rp.broadcast_parameters(model.state_dict(), comm=comm)
        run(model, optimizer, comm.rank, H)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        before = weights(model)
        for batch in batches(comm.rank, H, start=H):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for param in model.parameters():
                param.grad.zero_()
            optimizer.step()
        assert same_bytes(weights(model), before)
        return before

    results = rp.simulate(3, rank)
    assert all(same_bytes(found, results[0]) for found in results)


def test_statistics_are_shared_in_the_first_interval_and_resume_after_a_forward_pass() -> None:
    """Once they were each rank's own until the first exchange; and a forward pass before saving was forgotten."""

    def wrapped(comm: rp.comm.Communicator, model: Normed) -> rp.DistributedOptimizer:
        return rp.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), policy=POLICIES["iwp"], comm=comm, model=model
        )

    def alike() -> Normed:
        model = Normed()
        for param in model.parameters():
            param.data.fill_(0.01)
        return model

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = alike()
        optimizer = wrapped(comm, model)
        run(model, optimizer, comm.rank, 1)
        with optimizer.shared_weights():
            common = model.norm.running_mean.clone()
        run(model, optimizer, comm.rank, H - 1, start=1)
        model(next(iter(batches(comm.rank, 1, 50)))[0])
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again = alike()
        other = wrapped(comm, again)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        assert same_bytes(again.norm.running_mean, model.norm.running_mean)
        return common

    results = rp.simulate(2, rank)
    assert same_bytes(*results)


def test_weights_that_one_rank_alone_changes_between_intervals_are_found() -> None:
    """They once became its shared weights, silently; max_norm of an Embedding did so at each look-up."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"])
        run(model, optimizer, comm.rank, H)
        with torch.no_grad():
            model.get_parameter("0.weight")[0, 0] += comm.rank
        with pytest.raises(rp.RankMismatchError, match=r"parameter '0\.weight' has other weights on rank 1"):
            run(model, optimizer, comm.rank, H, start=H)

    rp.simulate(2, rank)


def test_an_optimizer_that_fails_on_one_rank_is_told_to_all(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients are a rank's own, so its optimizer may fail alone: the others once waited for it in the exchange."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"], lambda params: FailingSGD(params, lr=0.1))
        optimizer._inner.error = TypeError("cannot go on") if comm.rank == 1 else None
        with pytest.raises(rp.UsageError, match=r"rank 1: TypeError in step\(\) of the wrapped optimizer: cannot go"):
            run(model, optimizer, comm.rank, H)

    with caplog.at_level(logging.CRITICAL, "ringprune"):
        rp.simulate(2, rank)


def test_sixteen_bit_parameters_keep_exact_shared_weights() -> None:
    """Updates below the parameters' resolution add up in float32 instead of being lost at every exchange."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Linear(64, 64, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=2.0**-7), policy=rp.IWP(1.0, local_steps=1), comm=comm
        )
        for _ in range(4):  # rank 0 moves by two bfloat16 steps below 1, the mean of four ranks by half a step
            optimizer.zero_grad()
            (model.weight * float(comm.rank == 0)).sum().backward()
            optimizer.step()
        state = optimizer.state_dict()["ringprune"]["parameters"]["parameter 0"]
        return model.weight.detach().float(), state["shared"]

    for own, common in rp.simulate(4, rank):
        assert common.dtype == torch.float32
        assert torch.equal(common, torch.full_like(common, 1 - 2.0**-7)) and torch.equal(own, common)


@pytest.mark.parametrize("policy", ["iwp", "dense"])
def test_in_a_hierarchy_nodes_exchange(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], hierarchical=True)
        history = []
        for _ in range(3):
            run(model, optimizer, comm.rank, H)
            history.append(weights(model))
        return history

    results = rp.simulate(4, rank, ranks_per_node=2)
    assert all(same_bytes(a, b) for other in results for a, b in zip(other, results[0], strict=True))


def test_sparse_adam_works_where_gradients_stay_local() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = nn.Embedding(300, 16, sparse=True)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SparseAdam(model.parameters(), lr=0.1), policy=rp.IWP(1.0, local_steps=2), comm=comm
        )
        for step in range(4):
            optimizer.zero_grad()
            model(torch.tensor([comm.rank, 10 + step])).sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    results = rp.simulate(2, rank)
    assert same_bytes(*results)
    assert (results[0] != 1).any(dim=1).nonzero().flatten().tolist() == [0, 1, 10, 11, 12, 13]


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
@pytest.mark.parametrize(
    "make",
    [rp.IWP, rp.Dense, rp.RandomK, rp.DGC, rp.ScaleCom, rp.SlimDP, rp.MIPD, rp.LocalSteps],
    ids=lambda make: make.__name__,
)
def test_no_number_of_steps(make: Callable[..., Any], value: Any) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match="local_steps"):
        make(value) if make is rp.LocalSteps else make(local_steps=value)


@pytest.mark.parametrize("values", [{"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"outer_momentum": -0.1}])
def test_outer_step_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(rp.ConfigurationError, match="|".join(values)):
        rp.LocalSteps(4, **values)


def test_what_cannot_go_with_local_steps_is_refused_with_the_reason() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        with pytest.raises(rp.ConfigurationError, match="op=Sum with local_steps"):
            wrap(model, comm, POLICIES["iwp"], op="sum")
        with pytest.raises(rp.ConfigurationError, match="LBFGS"):
            wrap(model, comm, POLICIES["iwp"], torch.optim.LBFGS)

    rp.simulate(1, rank)
    with pytest.raises(rp.ConfigurationError, match="local_steps with ddp_hook"):
        rp.ddp_hook(POLICIES["iwp"])


@pytest.mark.parametrize(
    ("make", "policy", "told"),
    [
        (torch.optim.AdamW, rp.IWP(0.05), True),
        (torch.optim.RMSprop, rp.DGC(), True),
        (torch.optim.AdamW, rp.IWP(0.05, local_steps=1), False),
        (torch.optim.AdamW, rp.Dense(), False),
        (torch.optim.SGD, rp.IWP(0.05), False),
    ],
)
def test_a_combination_known_to_train_worse_is_told_once_with_the_reason(
    make: Any, policy: rp.Policy, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, lambda comm: wrap(make_model(), comm, policy, lambda params: make(params, lr=0.1)))
    assert [record.message.startswith(make.__name__) for record in caplog.records] == [True] * told


def test_inside_shared_weights_nothing_can_be_trained() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES["iwp"])
        run(model, optimizer, comm.rank, 1)
        own = weights(model)
        with optimizer.shared_weights():
            with pytest.raises(rp.UsageError, match=r"step\(\) inside shared_weights"):
                optimizer.step()
            with pytest.raises(rp.UsageError, match=r"flush\(\) inside shared_weights"):
                optimizer.flush()
            with pytest.raises(rp.UsageError, match="shared_weights"), optimizer.shared_weights():
                pass
            assert same_bytes(weights(model), weights(make_model()))
        assert same_bytes(weights(model), own)
        with pytest.raises(KeyError), optimizer.shared_weights():
            raise KeyError("evaluation failed")
        assert same_bytes(weights(model), own)

    rp.simulate(2, rank)


def test_in_gradient_mode_the_weights_are_the_shared_ones() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 2)
        assert same_bytes(shared(model, optimizer), weights(model))

    rp.simulate(2, rank)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
    ids=["AdamW", "SGD with decay", "SGD"],
)
def test_sparse_gradients_train_as_dense_ones(make: Any) -> None:
    """Adam, and SGD with weight decay, take no sparse gradients: the fourth step raised, with nothing learned."""
    start = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 1)).state_dict()

    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        weights = []
        for sparse in (True, False):
            model = nn.Sequential(nn.Embedding(300, 8, sparse=sparse), nn.Linear(8, 1))
            model.load_state_dict(start)
            optimizer = rp.DistributedOptimizer(
                make(model.parameters()), model.named_parameters(), comm=comm, policy=rp.Dense(local_steps=2)
            )
            for step in range(6):
                optimizer.zero_grad()
                model(torch.arange(5) * 7 + 11 * comm.rank + step).square().sum().backward()
                optimizer.step()
            weights.append(model[0].weight.detach().clone())
            optimizer.close()
        return weights

    for sparse, dense in rp.simulate(2, rank, timeout=60):
        torch.testing.assert_close(sparse, dense)
