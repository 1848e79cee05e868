"""Scheduling across the barrier between steps (P3): the same weights, made layer by layer; what cannot go with it."""

import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune import driver
from tests.test_gates import Attention
from tests.training import (
    OPTIMIZERS,
    FailingSGD,
    MakeOptimizer,
    batches,
    loss_of,
    make_model,
    run,
    same_bytes,
    sgd,
    weights,
)

SLICED = rp.P3(slice_bytes=4096, credit_bytes=8192, fuse_bytes=600)
IWP = rp.IWP(0.05)
SCHEDULED = replace(IWP, schedule=rp.LayerPriority())


def wrap(
    of: nn.Module, comm: rp.comm.Communicator, policy: Any = SLICED, make: MakeOptimizer = sgd, **options: Any
) -> rp.DistributedOptimizer:
    options = {"model": of, "named_parameters": of.named_parameters()} | options
    return rp.DistributedOptimizer(make(of.parameters()), policy=policy, comm=comm, **options)


def trained(ranks: int, policy: Any, make: MakeOptimizer = sgd, steps: int = 8, **options: Any) -> list[Tensor]:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy, make, **options)
        run(model, optimizer, comm.rank, steps)
        with optimizer.shared_weights():
            return weights(model)

    return rp.simulate(ranks, rank, timeout=60)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_weights_are_those_without_scheduling_bit_for_bit(make: MakeOptimizer, ranks: int) -> None:
    expected = trained(ranks, rp.Dense(), make)[0]
    assert all(same_bytes(got, expected) for got in trained(ranks, SLICED, make))


@pytest.mark.parametrize("policy", [SLICED, SCHEDULED], ids=["dense", "packed"])
def test_gradients_may_be_changed_before_the_step_where_nothing_overlaps(policy: rp.Policy) -> None:
    """With ``overlap=False`` only buckets without a gradient were sent, and the next forward pass waited for ever."""

    def clipped(policy: rp.Policy) -> list[Tensor]:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy, overlap=False)
            for batch in batches(comm.rank, 6):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)

    expected = clipped(replace(policy, schedule=None))[0]
    assert all(same_bytes(got, expected) for got in clipped(policy))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_compressed_exchange_is_scheduled_likewise(make: MakeOptimizer) -> None:
    expected = trained(3, IWP, make)[0]
    assert all(same_bytes(got, expected) for got in trained(3, SCHEDULED, make))


@pytest.mark.parametrize(
    "policy",
    [
        rp.IWP(0.1, roots="all", values="int8", dense_values="int8"),
        rp.RandomK(0.1),
        rp.DGC(0.1),
        rp.SlimDP(0.1, refresh=3),
        rp.OkTopk(0.1),
        rp.Dense("int8"),
    ],
    ids=lambda policy: f"{policy.name}-{policy.values}",
)
def test_any_policy_gives_the_same_weights_on_all_ranks(policy: rp.Policy) -> None:
    got = trained(3, replace(policy, schedule=rp.LayerPriority(4096, 8192, 600)))
    assert all(same_bytes(each, got[0]) for each in got)
    assert not same_bytes(got[0], weights(make_model()))


def test_step_returns_before_the_step_is_made_and_layers_make_it_when_they_run() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.P3(fuse_bytes=0))
        run(model, optimizer, comm.rank, 2)  # the first pass is watched, the second waits layer by layer
        optimizer.synchronize()
        before, seen = weights(model), []
        loss_of(model, next(batches(comm.rank, 1))).backward()
        optimizer.step()
        assert same_bytes(weights(model), before)
        hook = model[2].register_forward_pre_hook(
            lambda module, args: seen.append([p.clone() for p in model.parameters()])
        )
        model(torch.ones(1, 64))
        hook.remove()
        old = torch.split(before, [p.numel() for p in model.parameters()])
        moved = [not same_bytes(a.reshape(-1), b) for a, b in zip(seen[0], old, strict=True)]
        assert moved == [True, True, True, True, False, False]
        assert not any(same_bytes(p.detach().reshape(-1), b) for p, b in zip(model.parameters(), old, strict=True))
        optimizer.close()

    rp.simulate(2, rank, timeout=60)


def test_settings_changed_after_step_are_those_of_the_next() -> None:
    """Schedulers change the learning rate right after ``step()``, when no layer has made it."""

    def loop(policy: Any) -> list[Tensor]:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            for batch in batches(comm.rank, 6):
                loss_of(model, batch).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)

    assert same_bytes(loop(SLICED)[0], loop(rp.Dense())[0])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before backward", "after step"])
def test_gradients_may_be_reset_wherever_they_usually_are(to_none: bool, when: str) -> None:
    def loop(policy: Any) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy)
            for batch in batches(comm.rank, 5):
                loss = loss_of(model, batch)
                if when == "before backward":
                    optimizer.zero_grad(set_to_none=to_none)
                loss.backward()
                optimizer.step()
                if when == "after step":
                    optimizer.zero_grad(set_to_none=to_none)
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


def test_clipping_the_averages_between_synchronize_and_step() -> None:
    def loop(policy: Any) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy, OPTIMIZERS["nesterov"])
            for batch in batches(comm.rank, 5):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            return weights(model)

        return rp.simulate(2, rank, timeout=60)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


@pytest.mark.parametrize("passes", [2, 3])
def test_gradients_of_several_passes_are_sent_after_the_last(passes: int) -> None:
    def loop(policy: Any) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy, backward_passes_per_step=passes)
            for number, batch in enumerate(batches(comm.rank, 4 * passes)):
                loss_of(model, batch).backward()
                if number % passes == passes - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


def test_parameters_without_a_gradient_on_some_ranks_or_on_all() -> None:
    def loop(policy: Any) -> list[Tensor]:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            torch.manual_seed(0)
            model = Attention()
            with torch.no_grad():
                for number, param in enumerate(model.parameters()):
                    param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param) * (number + 1) / 10)
            optimizer = wrap(model, comm, policy, OPTIMIZERS["decayed"])
            for step in range(4):
                optimizer.zero_grad()
                x = torch.full((3, 1, 8), float(step + comm.rank)).cumsum(2)
                loss = (model(x) if comm.rank else model.last(x)).square().mean()
                loss.backward()
                optimizer.step()
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)

    got, expected = loop(rp.P3(64, 128, fuse_bytes=32)), loop(rp.Dense())
    assert all(same_bytes(each, expected[0]) for each in got)


@pytest.mark.parametrize("policy", [SLICED, SCHEDULED, replace(rp.Dense("int8"), schedule=rp.LayerPriority(4096))])
def test_saving_loading_and_going_on_equals_not_stopping(policy: rp.Policy) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        run(model, optimizer, comm.rank, 4)
        saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        run(model, optimizer, comm.rank, 4, start=4)
        optimizer.synchronize()
        again = make_model(seed=5)
        resumed = wrap(again, comm, policy)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        run(again, resumed, comm.rank, 4, start=4)
        resumed.synchronize()
        assert same_bytes(weights(again), weights(model))

    rp.simulate(2, rank, timeout=60)


def test_the_models_state_is_that_after_the_step() -> None:
    """``model.state_dict()`` reads parameters where no forward pass waits for them."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 3)
        saved = copy.deepcopy(model.state_dict())
        optimizer.synchronize()
        assert all(same_bytes(saved[name], param.detach()) for name, param in model.named_parameters())

    rp.simulate(2, rank, timeout=60)


def test_a_gradient_that_is_not_finite_is_told_on_all_ranks_by_the_next_step() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, SCHEDULED)
        run(model, optimizer, comm.rank, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        first, second = batches(comm.rank, 2)
        loss = loss_of(model, first)
        (loss * float("nan") if comm.rank == 1 else loss).backward()
        optimizer.step()
        loss_of(model, second).backward()
        with pytest.raises(rp.NonFiniteGradientError, match=r"rank 1: .*NaN or infinite.*go back to a checkpoint"):
            optimizer.step()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run(model, optimizer, comm.rank, 2)
        optimizer.close()
        assert bool(weights(model).isfinite().all())

    rp.simulate(3, rank, timeout=60)


def test_a_gradient_that_is_not_finite_is_told_by_synchronize_before_the_step() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 2)
        optimizer.synchronize()
        before = weights(model)
        loss = loss_of(model, next(batches(comm.rank, 1)))
        (loss * float("nan") if comm.rank == 1 else loss).backward()
        with pytest.raises(rp.NonFiniteGradientError, match="No weight has changed since"):
            optimizer.synchronize()
        assert same_bytes(weights(model), before)

    rp.simulate(2, rank, timeout=60)


def test_a_backward_pass_too_many_is_told_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        for batch in batches(comm.rank, 2 if comm.rank == 1 else 1):
            loss_of(model, batch).backward()
        optimizer.step()
        # It may have come to light before what rank 1 had found went out, or go with the next step's.
        with pytest.raises(rp.UsageError, match=r"rank 1: .*backward_passes_per_step=1.*go back to a checkpoint"):
            run(model, optimizer, comm.rank, 1)
            optimizer.synchronize()

    rp.simulate(2, rank, timeout=60)


def test_a_step_that_fails_raises_in_the_forward_pass_of_that_rank() -> None:
    """And leaves no averages in .grad, to which the next backward pass would add."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = FailingSGD(model.parameters(), lr=0.1)
        optimizer = wrap(model, comm, SLICED, lambda params: inner)
        run(model, optimizer, comm.rank, 2)
        inner.error = MemoryError("made up") if comm.rank == 1 else None
        with pytest.raises(MemoryError) if inner.error else nullcontext():
            model(torch.ones(1, 64))
        assert all(param.grad is None for param in model.parameters())
        inner.error = None
        if comm.rank == 0:
            run(model, optimizer, comm.rank, 2)

    with pytest.raises(rp.CommunicatorError, match="rank 1"):  # it has gone, with steps missing
        rp.simulate(2, rank, timeout=20)


@pytest.mark.parametrize("fails", [False, True])
def test_waiting_at_the_end_of_the_program_is_told(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one rank a step short a job waited in silence; what went wrong there was dropped, and the status was 0."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if fails and now > 0.015:
            last._error = RuntimeError("rank 1 is gone")

    class Dispatch:
        complete = True

        @property
        def quiet(self) -> bool:
            return now > 0.05

    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(driver, "TOLD_AFTER", 0.01)
    monkeypatch.delattr(sys, "last_value", raising=False)  # pytest leaves a failed test's error there
    last = driver.Driver(cast(Any, Dispatch()), torch.device("cpu"), threaded=False)
    last._end()
    levels = [record.levelname for record in caplog.records]
    assert levels == (["WARNING", "ERROR"] if fails else 3 * ["WARNING"]), "after 10, 20 and 40 ms"
    assert all("has made fewer steps" in record.getMessage() for record in caplog.records)
    assert ("rank 1 is gone" in caplog.text) == fails


def test_after_ranks_have_drifted_apart_one_can_go_back_to_a_checkpoint() -> None:
    """The error came out of backward() and left its gradients: no checkpoint could be loaded, and step() waited."""

    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, rp.P3(), sgd, check_every=1)
        run(model, optimizer, comm.rank, 2)
        optimizer.synchronize()
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        with torch.no_grad():
            next(model.parameters()).add_(float(comm.rank))
        with pytest.raises(rp.RankMismatchError, match="parameter"):
            run(model, optimizer, comm.rank, 3)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run(model, optimizer, comm.rank, 2)
        optimizer.synchronize()
        return weights(model)

    every = rp.simulate(2, rank)
    assert same_bytes(*every)


def test_what_was_sent_is_what_dense_sends_and_the_orders() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 5)
        optimizer.synchronize()
        stats = optimizer.stats()
        numel = sum(p.numel() for p in model.parameters())
        assert stats["bytes_dense"] == pytest.approx(5 * 2 * 2 / 3 * 4 * numel)
        of_parameters = sum(sent["dense"] for sent in stats["parameters"].values())
        assert of_parameters == pytest.approx(stats["bytes_dense"])
        assert list(stats["parameters"]) == [name for name, _ in model.named_parameters()]

    rp.simulate(3, rank, timeout=60)


def test_synchronize_may_be_called_at_any_time_and_by_one_rank_alone() -> None:
    """It once began an exchange of zeros where a step had been settled already, on that rank only."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 2)
        if comm.rank == 0:
            with optimizer.shared_weights():
                pass
            optimizer.synchronize()
        optimizer.synchronize()
        optimizer.synchronize()
        run(model, optimizer, comm.rank, 2)
        optimizer.close()

    rp.simulate(2, rank, timeout=60)


class Otherwise(nn.Module):
    """Reads a weight in evaluation without calling its module; and in training, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.other:
            out: Tensor = self.last(self.first(x))
            return out
        return nn.functional.linear(x, self.last.weight) + nn.functional.linear(x, self.first.weight)


def test_evaluation_may_go_another_way_than_training() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        torch.manual_seed(0)
        model = Otherwise()
        optimizer = wrap(model, comm)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        found = model.eval()(torch.ones(1, 4))
        optimizer.synchronize()
        assert same_bytes(found.detach(), model(torch.ones(1, 4)).detach())

    rp.simulate(1, rank)


def test_a_forward_pass_that_goes_another_way_is_noticed_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        torch.manual_seed(0)
        model = Otherwise()
        optimizer = wrap(model, comm)
        for step in range(6):
            model.other = step > 2
            before = model.last.weight.detach().clone()
            loss = model(torch.ones(2, 4)).sum()
            # The first pass that goes another way has read what was there; later ones wait.
            assert same_bytes(model.last.weight.detach(), before) == (step in (0, 3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()

    rp.simulate(1, rank)
    (said,) = [record.message for record in caplog.records if "before its last step" in record.message]
    assert "'last.weight'" in said


def test_where_no_hook_comes_before_a_use_the_step_is_made_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in a graph compiled before: every pass used old weights, and was told that it would not do so again."""

    def rank(comm: rp.comm.Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, comm, make=lambda params: torch.optim.SGD(params, lr=1.0))
        steps = []
        for number in range(6):
            steps.append(-model.weight.item())
            (model if not number else model.forward)(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return steps

    assert rp.simulate(2, rank) == [[0.0, 0.0, 1.0, 3.0, 4.0, 5.0]] * 2
    said = [record.message for record in caplog.records if "before its last step" in record.message]
    assert len(said) == 4
    assert all("step() makes the whole step itself" in message for message in said[-2:])


def test_hooks_that_are_there_already_see_parameters_after_the_step() -> None:
    """weight_norm computes the weight in a hook of its own: the gates have to come before."""

    def normed() -> nn.Module:
        layer: nn.Module = make_model()[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch has another one now, with no hook of its own
            return torch.nn.utils.weight_norm(layer)

    def loop(policy: Any) -> Tensor:
        models = [normed() for _ in range(2)]

        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = models[comm.rank]
            optimizer = wrap(model, comm, policy)
            for batch in batches(comm.rank, 4):
                optimizer.zero_grad()
                model(batch[0]).square().mean().backward()
                optimizer.step()
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_steps_made_while_a_model_is_evaluated_are_steps_like_others(mode: Any) -> None:
    """State made in inference mode could not be changed outside of it; autocast rounded products of Adafactor's."""

    def adafactor(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params, lr=0.01)

    def loop(policy: Any) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            optimizer = wrap(model, comm, policy, adafactor)
            for batch in batches(comm.rank, 5):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                with mode():
                    model(batch[0])
            with optimizer.shared_weights():
                return weights(model)

        return rp.simulate(2, rank, timeout=60)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


@pytest.mark.parametrize("overlap", [True, False])
def test_training_goes_on_after_synchronize_has_told_of_the_step_before(overlap: bool) -> None:
    """Without overlap the backward pass since was kept: zero_grad() was refused, and the next pass was one too many."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, overlap=overlap, nonfinite="raise")
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        (batch,) = batches(comm.rank, 1)
        loss = loss_of(model, batch)
        (loss * float("nan") if comm.rank else loss).backward()
        optimizer.step()
        loss_of(model, batch).backward()
        with pytest.raises(rp.NonFiniteGradientError, match="rank 1"):
            optimizer.synchronize()
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run(model, optimizer, comm.rank, 3)
        optimizer.synchronize()
        assert weights(model).isfinite().all()

    rp.simulate(2, rank, timeout=60)


def test_a_wrapper_that_is_dropped_still_makes_its_last_step() -> None:
    def loop(policy: Any) -> Tensor:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = make_model()
            run(model, wrap(model, comm, policy), comm.rank, 3)
            gc.collect()
            model.state_dict()
            gc.collect()
            assert policy is not SLICED or not model._forward_hooks
            return weights(model)

        return rp.simulate(1, rank)[0]

    assert same_bytes(loop(SLICED), loop(rp.Dense()))


def test_a_flush_of_slices() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, replace(IWP, schedule=rp.LayerPriority(64, 8192, 32)), OPTIMIZERS["plain_sgd"])
        run(model, optimizer, comm.rank, 4)
        optimizer.flush()
        assert not any(kept["residual"].any() for kept in optimizer.state_dict()["ringprune"]["parameters"].values())
        return weights(model)

    got = rp.simulate(2, rank, timeout=60)
    assert same_bytes(got[0], got[1])


def test_no_gradient_is_kept_once_its_step_was_made() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 3)
        optimizer.synchronize()
        assert optimizer._mode is not None
        assert not optimizer._mode._outputs
        assert all(param.grad is None for param in model.parameters())

    rp.simulate(2, rank, timeout=60)


def test_a_copy_of_the_model_and_one_from_a_file_have_hooks_that_do_nothing(tmp_path: Any) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 3)
        optimizer.synchronize()
        torch.save(model, tmp_path / "model.pt")
        for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            loss_of(model, next(batches(0, 1))).backward()
            optimizer.step()
            before = weights(model)
            other(torch.ones(1, 64))
            assert same_bytes(weights(model), before)
            optimizer.synchronize()
            assert not same_bytes(weights(model), before)

    rp.simulate(1, rank)


def test_a_scheduler_of_the_wrapped_optimizer_has_nothing_to_warn_about() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        inner = sgd(model.parameters())
        optimizer = wrap(model, comm, SLICED, lambda params: inner)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1)
        for batch in batches(comm.rank, 2):
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
        optimizer.close()

    rp.simulate(1, rank)


class InPlace(torch.optim.SGD):
    """Counts in a tensor of its param groups, in place."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_place_is_found_out_too() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = InPlace(params, lr=0.1)
        optimizer.param_groups[0]["count"] = torch.zeros(1)
        return optimizer

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, SLICED, make)
        run(model, optimizer, comm.rank, 1)
        with pytest.raises(rp.ConfigurationError, match=r"InPlace keeps 'count'"):
            optimizer.synchronize()

    rp.simulate(1, rank)


class Counting(torch.optim.SGD):
    """Keeps a count in its param groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_keeps_something_in_its_groups_is_found_out() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, SLICED, lambda params: Counting(params, lr=0.1))
        run(model, optimizer, comm.rank, 1)
        with pytest.raises(rp.ConfigurationError, match=r"Counting keeps 'count'.*layer by layer"):
            optimizer.synchronize()

    rp.simulate(1, rank)


@functools.cache
def compiled() -> Any:
    """Made once: what torch loads for it cannot be loaded by two ranks at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch imports for it
        return torch.compile(make_model())


WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "no model": (lambda model: {"model": None}, "give the wrapper model="),
    "not a module": (lambda model: {"model": "resnet50"}, "a torch.nn.Module"),
    "another model": (lambda model: {"model": nn.Linear(2, 2)}, r"6 parameters are not in model=: '0\.weight'"),
    "compiled": (lambda model: {"model": compiled()}, "OptimizedModule.*plain module"),
    "in parallel": (lambda model: {"model": nn.DataParallel(model)}, "DataParallel.*one process per device"),
    "scaler": (lambda model: {"scaler": torch.amp.GradScaler("cpu")}, "scaler cannot go with.*bfloat16"),
    "skip": (lambda model: {"nonfinite": "skip"}, "have made the step"),
    "guard": (lambda model: {"guard": rp.Guard()}, "guard cannot go with"),
    "hierarchical": (lambda model: {"hierarchical": True}, "hierarchical=True cannot go with"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_go_with_a_schedule_is_refused_with_the_reason(wrong: str) -> None:
    compiled()

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        options, message = WRONG[wrong][0](model), WRONG[wrong][1]
        with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=message):
            wrap(model, comm, **options)
        optimizer = wrap(model, comm)  # nothing is left behind
        run(model, optimizer, comm.rank, 1)
        optimizer.close()

    rp.simulate(2, rank, timeout=60)


def test_float16_parameters_of_which_something_is_kept_back_are_refused() -> None:
    """What was kept back adds up beyond float16, and the step of the first layers had been made with infinities."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model().half()
        with pytest.raises(rp.ConfigurationError, match=r"float16 parameters, such as '0\.weight.*torch\.autocast"):
            wrap(model, comm, replace(rp.IWP(0.1, min_numel=1), schedule=rp.LayerPriority()))
        wrap(model, comm, rp.P3()).close()
        # Sums of finite gradients may be infinite with nothing kept back at all.
        with pytest.raises(rp.ConfigurationError, match=r"sends sums of 6 float16 parameters"):
            wrap(model, comm, rp.P3(), op="sum")

    rp.simulate(2, rank, timeout=60)


def test_a_step_without_a_backward_pass_is_told_with_what_it_has_done() -> None:
    """Layers step on its zeros, with momentum and decay: a step without a schedule is not made, and says no more."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 1)
        optimizer.step()
        with pytest.raises(rp.UsageError, match=r"before backward.*layers have made the step: go back to a checkpoint"):
            optimizer.synchronize()
        optimizer.close()

    rp.simulate(2, rank, timeout=60)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(rp.Dense(local_steps=4), schedule=rp.LayerPriority()), "local_steps=None"),
        (lambda: replace(rp.IWP(0.1, lookahead=True), schedule=rp.LayerPriority()), "lookahead=False"),
        (lambda: replace(rp.MIPD(0.1), schedule=rp.LayerPriority()), "turns=1"),
        (lambda: replace(rp.IWP(0.1, clip_norm=1.0), schedule=rp.LayerPriority()), "clip_norm_per_tensor"),
        (lambda: replace(rp.Dense(), schedule="p3"), "LayerPriority"),
        (lambda: replace(rp.IWP(0.1, reduction="ring"), schedule=rp.LayerPriority()), "match by their order"),
    ],
)
def test_policies_that_cannot_be_scheduled_are_refused(make: Callable[[], rp.Policy], message: str) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=message):
        make()


def test_closing_makes_the_step_and_a_wrapper_that_is_dropped_leaves_nothing_behind() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 3)
        before = weights(model)
        optimizer.close()
        assert not same_bytes(weights(model), before)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 1)
        optimizer.synchronize()
        del optimizer
        gc.collect()
        model(torch.ones(1, 64))
        optimizer = wrap(model, comm)
        run(model, optimizer, comm.rank, 1)
        optimizer.close()

    rp.simulate(2, rank, timeout=60)


def test_slices_follow_what_is_behind_a_parameter() -> None:
    """Slices of old memory were compared at the start, and those of another layout could not be cut."""

    def loop(policy: rp.Policy) -> list[Tensor]:
        def rank(comm: rp.comm.Communicator) -> Tensor:
            model = nn.Conv2d(4, 64, 3, bias=False)
            with torch.no_grad():
                model.weight.fill_(comm.rank)
            optimizer = wrap(model, comm, policy)
            model.weight.data = torch.full((64, 4, 3, 3), 0.5)
            model.to(memory_format=torch.channels_last)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 4, 5, 5), comm.rank + 1.0)).square().mean().backward()
                optimizer.synchronize()
                optimizer.step()
            return weights(model)

        return rp.simulate(2, rank, timeout=60)

    assert same_bytes(loop(SLICED)[0], loop(rp.Dense())[0])
