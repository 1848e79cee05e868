"""Training with ``policy="auto"``: nothing is lost on a change, ranks make it together, and trouble ends nothing."""

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune import other_wrappers
from ringprune.auto import pilot
from ringprune.auto.decision import packed_of, packing
from ringprune.gradient_mode import GradientMode
from tests.auto.made_up import follow, quick
from tests.training import OPTIMIZERS, loss_of, make_model, nesterov, run, sgd, train, weights, wrap
from tests.training import batches as batches_of

PACKED = {
    "plain": rp.IWP(0.05, mask_velocity=False),
    "coded": rp.IWP(0.05, values="int8", dense_values="bf16", mask_velocity=False),
    "refreshed": rp.IWP(0.05, refresh=3, explore=0.2, mask_velocity=False),
    "error feedback": rp.IWP(0.05, correction="global"),
    "gathered": rp.DGC(0.05, mask_velocity=False),
    "dense coded": rp.Dense("int8"),
}


INTERVAL = pilot.Pilot._interval


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("make", [sgd, torch.optim.SGD])
def test_nothing_is_lost_when_candidates_change(monkeypatch: pytest.MonkeyPatch, packed: str, make: Any) -> None:
    """SGD at a constant rate moves a weight by lr / (1 - m) times the sum of its mean gradients, whoever exchanges.

    Gradients here do not depend on the weights; steps on none follow, until momentum is used up.
    """
    follow(monkeypatch, [1, 0])
    policy = rp.Auto((rp.Dense(), PACKED[packed]))
    momentum = 0.9 if make is sgd else 0.0
    steps, fading = 60, 240

    def rank(comm: rp.comm.Communicator) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
        model, total, chosen = make_model(), torch.zeros(64 * 64 + 64 * 48 + 48 * 10 + 64 + 48 + 10), set()
        begin = weights(model)
        inner = sgd if momentum else lambda params: torch.optim.SGD(params, lr=0.05)
        optimizer = wrap(model, comm, policy, inner)
        draw = torch.Generator().manual_seed(comm.rank)
        for step in range(steps + fading):
            drawn = [torch.randn(p.shape, generator=draw) * (step < steps) for p in model.parameters()]
            total += torch.cat([g.reshape(-1) for g in drawn])
            optimizer.zero_grad()
            torch.stack([(p * g).sum() for p, g in zip(model.parameters(), drawn, strict=True)]).sum().backward()
            optimizer.step()
            chosen.add(optimizer.stats()["auto"]["chosen"])
        return weights(model) - begin, total, chosen

    found = rp.simulate(3, rank)
    mean = torch.stack([total for _, total, _ in found]).mean(0)
    assert len(found[0][2]) == 2, "both were in use"
    for moved, _, _ in found:
        torch.testing.assert_close(moved, -0.05 / (1 - momentum) * mean, rtol=2e-4, atol=2e-4 * float(mean.abs().max()))
        assert torch.equal(moved, found[0][0])


def test_nothing_is_sent_whole_at_a_rate_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates were looked at one step before, and a scheduler came in between: the step lost all that was kept back."""
    follow(monkeypatch, [1, 0])

    def rank(comm: rp.comm.Communicator) -> tuple[list[float], int]:
        model, rates, left, asked_of = make_model(), [], 0, None
        optimizer = wrap(model, comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd)
        at_rest = 0
        for step in range(60):
            mode = cast(GradientMode, optimizer._mode)
            left = max(0, left - 1)
            if mode is not asked_of and mode.exchange._may_send_whole is not None:
                left, asked_of = 2, mode  # from now on, as a scheduler makes it after step()
            at_rest += bool(left)
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if left else 0.05
            run(model, optimizer, comm.rank, 1, start=step)
            rates += [optimizer.param_groups[0]["lr"]] if mode.exchange.sends_whole else []
        return rates, at_rest

    rates, at_rest = rp.simulate(2, rank)[0]
    assert at_rest >= 4
    assert len(rates) >= 2 and set(rates) == {0.05}


def changes(at_rest: Callable[[str], bool], packed: rp.Policy, steps: int) -> int:
    """How often candidates change while a group of the parameters named so has a learning rate of 0."""

    def rank(comm: rp.comm.Communicator) -> list[str]:
        model, chosen = make_model(), []
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, param in model.named_parameters():
            groups[at_rest(name)].append(param)
        inner = torch.optim.SGD([{"params": groups[True], "lr": 0.0}, {"params": groups[False]}], lr=0.05)
        optimizer = rp.DistributedOptimizer(
            inner, model.named_parameters(), policy=rp.Auto((rp.Dense(), packed)), comm=comm
        )
        for step in range(steps):
            run(model, optimizer, comm.rank, 1, start=step)
            chosen.append(optimizer.stats()["auto"]["chosen"])
        return chosen

    return sum(before != after for before, after in pairwise(rp.simulate(2, rank)[0]))


def test_a_group_at_rate_0_keeps_no_candidate_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as layers that are to learn later: what was to be left, perhaps a trial, was never left again."""
    follow(monkeypatch, [1, 0])
    monkeypatch.setattr(pilot, "PATIENCE", 4)
    assert changes(lambda name: name == "0.weight", rp.Dense("bf16"), 40) >= 4, "to and fro"


def test_a_group_that_keeps_nothing_back_may_be_at_rate_0(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [1, 0])
    assert changes(lambda name: name.endswith("bias"), rp.IWP(0.05), 20) >= 2, "at once, not after twenty steps"


def test_all_ranks_pack_what_rank_0_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last digit of a logarithm may be another on another processor, and the choice with it."""
    follow(monkeypatch, [1])
    find = pilot.options

    def found(setting: Any, policies: Any) -> list[Any]:
        options = find(setting, policies)
        name = "0.weight" if threading.current_thread().name == "rank 0" else "2.weight"
        options[1] = replace(options[1], policy=packing(policies[1], [name]))
        return options

    monkeypatch.setattr(pilot, "options", found)

    def rank(comm: rp.comm.Communicator) -> tuple[str, torch.Tensor, float]:
        model = make_model()
        optimizer = wrap(model, comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), bucket_bytes=10_000)
        run(model, optimizer, comm.rank, 20)
        stats = optimizer.stats()
        return stats["auto"]["chosen"], weights(model), stats["parameters"]["2.weight"]["values"]

    for chosen, trained, sent in (first := rp.simulate(2, rank, timeout=60)):
        assert chosen == "IWP 5 %"
        assert torch.equal(trained, first[0][1])
        assert sent == 0


@pytest.mark.parametrize(("faster", "dense"), [(0.5, 1), (0.95, 0)], ids=["by enough", "hardly"])
def test_what_is_said_to_be_packed_is_packed(monkeypatch: pytest.MonkeyPatch, faster: float, dense: int) -> None:
    """Where training stayed with a candidate, another mixture of it was told, and timed against, but never made."""
    follow(monkeypatch, [])
    find = pilot.options

    def found(setting: Any, policies: Any) -> list[Any]:
        options = find(setting, policies)
        step = replace(options[0].prediction, seconds=faster * options[0].prediction.seconds)
        options[0] = replace(options[0], policy=packing(policies[0], ["0.weight"]), prediction=step)
        return options

    monkeypatch.setattr(pilot, "options", found)

    def rank(comm: rp.comm.Communicator) -> tuple[str, Tensor, list[str]]:
        model = make_model()
        optimizer = wrap(model, comm, rp.Auto((rp.IWP(0.5), rp.Dense())), bucket_bytes=10_000)
        run(model, optimizer, comm.rank, 20)
        buckets = cast(GradientMode, optimizer._mode).plan.buckets
        return optimizer.stats()["auto"]["said"], weights(model), [bucket.route for bucket in buckets]

    for said, trained, routes in (first := rp.simulate(2, rank, timeout=60)):
        assert ("(1 of 2 packed buckets stay dense)" in said) == bool(dense)
        assert routes.count("packed") == 2 - dense
        assert torch.equal(trained, first[0][1])


def test_a_mixture_that_cannot_be_made_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that was kept back would be sent whole for it in every round."""
    follow(monkeypatch, [])
    find, build, tried = pilot.options, pilot.Pilot._build, []

    def found(setting: Any, policies: Any) -> list[Any]:
        options = find(setting, policies)
        step = replace(options[0].prediction, seconds=0.5 * options[0].prediction.seconds)
        options[0] = replace(options[0], policy=packing(policies[0], ["0.weight"]), prediction=step)
        return options

    def fails(this: Any, chosen: int, policy: rp.Policy, *rest: Any) -> None:
        if packed_of(policy) is not None:
            tried.append(chosen)
            raise MemoryError("made up")
        build(this, chosen, policy, *rest)

    monkeypatch.setattr(pilot, "options", found)
    monkeypatch.setattr(pilot.Pilot, "_build", fails)

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        run(model, wrap(model, comm, rp.Auto((rp.IWP(0.5), rp.Dense())), bucket_bytes=10_000), comm.rank, 40)
        return weights(model)

    with caplog.at_level(logging.WARNING, "ringprune"):
        first, second = rp.simulate(2, rank, timeout=60)
    assert torch.equal(first, second)
    assert tried == [0, 0], "once on each rank"
    assert "cannot exchange by IWP 50 % (MemoryError: made up)" in caplog.text


def test_a_rate_that_fell_before_a_change_has_fallen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each candidate knew the rates of its own steps alone, and a flush warned of one that had long fallen."""
    follow(monkeypatch, [1])

    def rank(comm: rp.comm.Communicator) -> None:
        model, chosen = make_model(), []
        optimizer = wrap(model, comm, rp.Auto((rp.Dense(), rp.IWP(0.05))))
        for step in range(40):
            chosen.append(optimizer.stats()["auto"]["chosen"])
            for group in optimizer.param_groups:
                group["lr"] = 0.05 if len(set(chosen)) < 2 else 5e-4
            run(model, optimizer, comm.rank, 1, start=step)
        assert chosen[0] != chosen[-1] and chosen[-1] == chosen[-2], "the rate was high under the first one alone"
        optimizer.flush()

    with caplog.at_level(logging.WARNING, "ringprune"):
        rp.simulate(2, rank)
    assert not [record for record in caplog.records if record.getMessage().startswith("flush()")]


def test_dense_all_the_time_is_dense_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [])
    auto = rp.simulate(3, lambda comm: train(comm, "auto", nesterov, 30)[0])
    dense = rp.simulate(3, lambda comm: train(comm, rp.Dense(), nesterov, 30)[0])
    assert torch.equal(auto[0], dense[0])


@pytest.mark.parametrize("make", [OPTIMIZERS[name] for name in OPTIMIZERS if name != "adamw"], ids=lambda f: f.__name__)
def test_a_change_to_a_policy_that_sends_all_changes_nothing(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Momentum goes to and fro: at density 1 momentum correction is SGD's momentum, but for rounding."""
    follow(monkeypatch, [1, 0])
    policy = rp.Auto((rp.Dense(), rp.IWP(1.0)))
    auto = rp.simulate(2, lambda comm: train(comm, policy, make, 40)[0])
    dense = rp.simulate(2, lambda comm: train(comm, rp.Dense(), make, 40)[0])
    torch.testing.assert_close(auto[0], dense[0], rtol=1e-4, atol=1e-5)


def test_momentum_of_before_is_let_go_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that was packed from the start has no such buffers."""
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> list[bool]:
        model, held = make_model(), []
        optimizer = wrap(model, comm, policy, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5))
        for step in range(70):
            run(model, optimizer, comm.rank, 1, start=step)
            kept = optimizer.state_dict()["ringprune"]["parameters"].get("0.weight", {})
            held.append("momentum" in kept)
        return held

    held = rp.simulate(2, rank)[0]
    assert any(held)
    assert not held[-1], "0.5 ** 40 is less than 1e-12"


def test_a_candidate_begins_as_if_training_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights' root mean squares, and with a core, whatever the number of the step."""
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05, refresh=500)))

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        optimizer = train(comm, policy, sgd, 12)[1]
        return dict(optimizer.state_dict()["ringprune"]["parameters"]["0.weight"])

    for kept in rp.simulate(2, rank):
        assert float(kept["rms"]) > 0
        assert int(kept["core"].sum()) == round(0.05 * 64 * 64)


def test_others_are_looked_for_once_whatever_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """That look takes as long as many steps, and steps of the candidates are compared, each in a mode of its own."""
    follow(monkeypatch, [1, 0])
    looks: list[int] = []
    monkeypatch.setattr(other_wrappers, "_holders", lambda ids: looks.append(1) or iter(()))
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> int:
        model, modes = make_model(), []
        optimizer = wrap(model, comm, policy, sgd)
        for _ in range(20):
            if optimizer._mode not in modes:
                modes.append(optimizer._mode)
            optimizer.zero_grad()
            torch.stack([p.sum() for p in model.parameters()]).sum().backward()
            optimizer.step()
        return len(modes)

    assert min(rp.simulate(2, rank)) > 2, "candidates took turns"
    assert len(looks) == 2 * 2, "on each rank at construction, and after the first step"


def test_bytes_of_parameters_add_up_over_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [1, 0])
    results = rp.simulate(2, lambda comm: train(comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, 30)[1].stats())
    stats = results[0]
    by_content = {
        content: sum(sent[content] for sent in stats["parameters"].values())
        for content in ("values", "indices", "dense", "headers")
    }
    assert by_content == pytest.approx({content: stats[f"bytes_{content}"] for content in by_content})
    assert all(by_content.values())


class Slow:
    """A communicator whose sums take a second per 200 kB, by a clock of each rank that nothing else moves."""

    _clock = threading.local()

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, tensor: torch.Tensor, *, name: str) -> Any:
        self._clock.seconds = self.seconds() + tensor.nbytes / 2e5
        return self._comm.allreduce(tensor, name=name)

    @classmethod
    def seconds(cls) -> float:
        """What this rank's sums have taken."""
        return getattr(cls._clock, "seconds", 0.0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sums take time."""
    monkeypatch.setattr(pilot, "time", SimpleNamespace(perf_counter=Slow.seconds))
    monkeypatch.setattr("ringprune.clock.CpuClock.now", lambda _: Slow.seconds())


@pytest.mark.usefixtures("slow")
def test_it_takes_what_is_faster_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ringprune")
    policy = rp.Auto((rp.Dense(), rp.IWP(0.02)))
    found = rp.simulate(2, lambda comm: train(cast(Any, Slow(comm)), policy, sgd, 40)[1].stats())
    said = [record.message for record in caplog.records if record.message.startswith("auto: ")]
    for stats in found:
        assert stats["auto"]["chosen"] == "IWP 2 %"
        assert stats["auto"]["timed_seconds"]["IWP 2 %"] < 0.02, "a dense step takes 155 ms"
        assert stats["density"] == 0.02
    assert len(said) == 1, "again and again it is the same"
    assert "Gbit/s x 2" in said[0]


@pytest.mark.usefixtures("slow")
def test_a_step_that_is_not_made_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was counted with the next one, and the exchange of that one as compute."""
    follow(monkeypatch, [])
    monkeypatch.setattr(pilot, "HELD", (3, 3, 0.0))
    seen: list[Any] = []
    measure = pilot.Pilot._measure
    monkeypatch.setattr(pilot.Pilot, "_measure", lambda self, times: seen.append(times.compute) or measure(self, times))

    def rank(comm: rp.comm.Communicator) -> None:
        model, slow = make_model(), cast(Any, Slow(comm))
        optimizer = wrap(model, slow, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd)
        for batch in batches_of(comm.rank, 12):
            for bad in (True, False) if optimizer._mode.timeline is not None else (False,):
                optimizer.zero_grad()
                (loss_of(model, batch) * (float("nan") if bad else 1.0)).backward()
                try:
                    optimizer.step()
                except rp.NonFiniteGradientError:
                    assert bad

    rp.simulate(2, rank, timeout=60)
    assert seen
    assert max(seen) < 1e-9, "an exchange takes 155 ms, all else nothing"


def test_skipped_steps_and_accumulation_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [1, 0])

    def rank(comm: rp.comm.Communicator) -> tuple[torch.Tensor, int]:
        model = make_model()
        optimizer = wrap(
            model, comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, nonfinite="skip", backward_passes_per_step=2
        )
        for number, batch in enumerate(batches_of(comm.rank, 60)):
            loss = loss_of(model, batch)
            (loss * float("nan") if number % 14 == 13 and comm.rank == 1 else loss).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model), optimizer.stats()["skipped_steps"]

    (a, skipped), (b, _) = rp.simulate(2, rank)
    assert skipped == 4
    assert torch.equal(a, b)
    assert bool(a.isfinite().all())


@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_and_explicit_synchronize_go_on(monkeypatch: pytest.MonkeyPatch, clip: bool) -> None:
    """A power of two as scale changes no bit, and overflows are skipped, whichever candidate exchanges."""
    follow(monkeypatch, [1, 0])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator, scale: float, bad: set[int]) -> tuple[torch.Tensor, int]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000, backoff_factor=0.5)
        optimizer = wrap(model, comm, policy, nesterov, scaler=scaler)
        for step, batch in enumerate(batches_of(comm.rank, 40)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * (float("inf") if step in bad and comm.rank == 1 else 1.0)).backward()
            if clip:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        return weights(model), optimizer.stats()["skipped_steps"]

    plain, scaled = (rp.simulate(2, lambda comm, s=s: rank(comm, s, set())) for s in (1.0, 1024.0))
    assert torch.equal(plain[0][0], scaled[1][0])
    bad = rp.simulate(2, lambda comm: rank(comm, 1024.0, {6, 7, 8, 9, 20}))
    assert torch.equal(bad[0][0], bad[1][0])
    assert bool(bad[0][0].isfinite().all())
    assert bad[0][1] == 5


@pytest.mark.parametrize(("spent", "steps"), [(0.0, 200), (1.0, 200), (2.5, 500), (1000.0, 200_000)])
def test_measuring_takes_no_more_than_its_share(spent: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % of the time at half a second a step, and it is not done for a while where it takes no time."""
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 200)
    at = SimpleNamespace(_spent=spent, _auto=rp.Auto(share=0.01), _seconds={1: 0.5}, chosen=1)
    assert INTERVAL.fget is not None
    assert INTERVAL.fget(at) == steps


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_the_candidate_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> tuple[torch.Tensor, torch.Tensor, str]:
        model = make_model()
        optimizer = wrap(model, comm, policy, nesterov)
        run(model, optimizer, comm.rank, 20)
        saved, at = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        run(model, optimizer, comm.rank, 10, start=20)
        optimizer.close()
        other = make_model(1)
        other.load_state_dict(at)
        again = wrap(other, comm, policy, nesterov)
        again.load_state_dict(saved)
        run(other, again, comm.rank, 10, start=20)
        return weights(model), weights(other), again.stats()["auto"]["chosen"]

    for whole, continued, chosen in rp.simulate(2, rank):
        assert chosen == "IWP 5 %"
        assert torch.equal(whole, continued)


def test_checkpoints_of_any_step_of_a_round_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between what sends everything and the change, and right after the change: momentum comes along.

    Continued by one candidate alone, which is what a checkpoint holds the state of.
    """
    follow(monkeypatch, [1, 0])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> list[tuple[float, float]]:
        model, norms = make_model(), []
        optimizer = wrap(model, comm, policy, sgd)
        for step in range(24):
            run(model, optimizer, comm.rank, 1, start=step)
            saved, at = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            other = make_model(1)
            other.load_state_dict(at)
            optimizer.close()
            again = wrap(other, comm, policy, sgd)
            again.load_state_dict(saved)
            norms.append((momentum_of(saved), momentum_of(again.state_dict())))
            model, optimizer = other, again
        return norms

    for norms in rp.simulate(2, rank):
        for saved, loaded in norms:
            assert saved == loaded > 0


@pytest.mark.parametrize("packed", [rp.IWP(0.05), rp.IWP(0.05, refresh=7)], ids=["rms", "core"])
def test_a_candidate_that_a_checkpoint_has_only_just_changed_to_begins_with_it(
    monkeypatch: pytest.MonkeyPatch, packed: rp.Policy
) -> None:
    """It went by a root mean square of 0 for up to 49 exchanges, and up to ``refresh`` of them sent nothing."""
    follow(monkeypatch, [1])
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    policy, changed = rp.Auto((rp.Dense(), packed)), 4  # exchanges made when it changes

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, ...]:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        run(model, optimizer, comm.rank, changed)
        assert optimizer.stats()["auto"]["chosen"] == "IWP 5 %"
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert saved[1]["ringprune"]["step"] == changed
        run(model, optimizer, comm.rank, 3, start=changed)
        optimizer.close()
        other = make_model(1)
        other.load_state_dict(saved[0])
        again = wrap(other, comm, policy)
        again.load_state_dict(saved[1])
        run(other, again, comm.rank, 3, start=changed)
        assert again.stats()["realised_density"] > 0.03
        return weights(model), weights(other)

    for whole, continued in rp.simulate(2, rank):
        assert torch.equal(whole, continued)


def momentum_of(state: dict[str, Any]) -> float:
    """The norm of all that is momentum, wherever it is kept."""
    ours = [kinds.get(kind) for kinds in state["ringprune"]["parameters"].values() for kind in ("momentum", "velocity")]
    theirs = [kept.get("momentum_buffer") for kept in state["state"].values()]
    return sum(float(tensor.norm()) for tensor in (*ours, *theirs) if tensor is not None)


def test_going_back_to_an_early_checkpoint_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])

    def rank(comm: rp.comm.Communicator) -> tuple[str, str]:
        model = make_model()
        optimizer = wrap(model, comm, rp.Auto((rp.Dense(), rp.IWP(0.05))))
        run(model, optimizer, comm.rank, 1)
        saved = optimizer.state_dict()
        run(model, optimizer, comm.rank, 30, start=1)
        before: str = optimizer.stats()["auto"]["chosen"]
        optimizer.load_state_dict(saved)
        run(model, optimizer, comm.rank, 15, start=1)
        after: str = optimizer.stats()["auto"]["chosen"]
        return before, after

    assert rp.simulate(2, rank) == [("IWP 5 %", "IWP 5 %")] * 2


def test_a_flushed_checkpoint_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    follow(monkeypatch, [1])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        model = make_model()
        optimizer = wrap(model, comm, policy, nesterov)
        run(model, optimizer, comm.rank, 12)
        optimizer.flush()
        return optimizer.state_dict(), model.state_dict()

    saved, at = rp.simulate(2, rank)[0]

    def alone(comm: rp.comm.Communicator) -> str:
        model = make_model(1)
        model.load_state_dict(at)
        optimizer = wrap(model, comm, policy, nesterov)
        optimizer.load_state_dict(saved)
        run(model, optimizer, 0, 5, start=12)
        chosen: str = optimizer.stats()["auto"]["chosen"]
        return chosen

    assert rp.simulate(1, alone) == ["IWP 5 %"]


def test_a_checkpoint_that_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [])
    policy = rp.Auto((rp.Dense(), rp.IWP(0.05)))

    def rank(comm: rp.comm.Communicator) -> torch.Tensor:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        run(model, optimizer, comm.rank, 6)
        state = optimizer.state_dict()
        wrong = [{"chosen": 1, "packed": None}, {"chosen": 7, "packed": None}, {"chosen": "iwp"}]
        for auto in wrong:
            with pytest.raises(rp.CheckpointError):
                optimizer.load_state_dict(state | {"ringprune": state["ringprune"] | {"auto": auto}})
        with pytest.raises(ValueError, match="different number of parameter groups"):  # torch's
            optimizer.load_state_dict(state | {"param_groups": 2 * state["param_groups"]})
        run(model, optimizer, comm.rank, 6, start=6)
        return weights(model)

    dense = rp.simulate(2, lambda comm: train(comm, rp.Dense(), sgd, 12)[0])
    assert torch.equal(rp.simulate(2, rank)[0], dense[0])


def test_tables_stay_with_their_owners_through_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is sent by both candidates: the rows and the layer are those of dense training, but for rounding."""
    follow(monkeypatch, [1, 0])

    class Model(nn.Module):
        def __init__(self, comm: rp.comm.Communicator) -> None:
            super().__init__()
            self.table = rp.ShardedEmbedding(31, 64, comm=comm)
            self.layers = make_model()

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(self.table(indices))
            return out

    def rank(comm: rp.comm.Communicator, policy: Any) -> tuple[set[str], list[torch.Tensor]]:
        model = Model(comm)
        optimizer = wrap(model, comm, policy, sgd)
        used = set()
        for step in range(12):
            draw = torch.Generator().manual_seed(100 * comm.rank + step)
            optimizer.zero_grad()
            loss_of(
                model, (torch.randint(31, (8,), generator=draw), torch.randint(10, (8,), generator=draw))
            ).backward()
            optimizer.step()
            used |= {optimizer.stats()["auto"]["chosen"]} if isinstance(policy, rp.Auto) else set()
        found = [model.table.gathered(), *(param.detach() for param in model.layers.parameters())]
        optimizer.close()
        return used, found

    auto = rp.Auto((rp.Dense(), rp.IWP(1.0, clip_norm=None)))
    (used, ours), *_ = rp.simulate(2, lambda comm: rank(comm, auto), timeout=60)
    (_, theirs), *_ = rp.simulate(2, lambda comm: rank(comm, rp.Dense()), timeout=60)
    assert len(used) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_be_measured_leaves_all_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ringprune")
    ranks: list[int] = []

    def fails(*_: Any, **__: Any) -> Any:
        ranks.append(0)
        raise OSError("no clock")

    monkeypatch.setattr(pilot, "measured", fails)
    auto = rp.simulate(2, lambda comm: train(comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, 20))
    dense = rp.simulate(2, lambda comm: train(comm, rp.Dense(), sgd, 20)[0])
    assert torch.equal(auto[0][0], dense[0])
    assert auto[0][1].stats()["auto"]["deciding"] is False
    assert any("rank 0 could not be measured (OSError: no clock)" in record.message for record in caplog.records)


def test_later_too_what_there_was_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change to the third of three candidates fails where training is with the second."""
    build = GradientMode.__init__

    def init(self: GradientMode, parts: Any) -> None:
        if parts.policy.values == "int8" and parts.comm.rank == 0:
            raise torch.OutOfMemoryError("2 GiB")
        build(self, parts)

    monkeypatch.setattr(GradientMode, "__init__", init)
    monkeypatch.setattr(pilot, "choose", lambda *a, **_: 2 if a[4] == 1 else 1)
    policy = rp.Auto((rp.IWP(0.1), rp.Dense(), rp.IWP(0.05, values="int8")))
    found = rp.simulate(2, lambda comm: train(comm, policy, nesterov, 40))
    assert {optimizer.stats()["auto"]["chosen"] for _, optimizer in found} == {"dense"}
    assert torch.equal(found[0][0], found[1][0])
    assert bool(found[0][0].isfinite().all())


def test_a_rank_without_memory_keeps_all_from_changing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ringprune")
    follow(monkeypatch, [1])
    build = GradientMode.__init__

    def init(self: GradientMode, parts: Any) -> None:
        if parts.policy.name == "iwp" and parts.comm.rank == 1:
            raise torch.OutOfMemoryError("2 GiB")
        build(self, parts)

    monkeypatch.setattr(GradientMode, "__init__", init)
    auto = rp.simulate(2, lambda comm: train(comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, 20))
    dense = rp.simulate(2, lambda comm: train(comm, rp.Dense(), sgd, 20)[0])
    assert torch.equal(auto[0][0], dense[0])
    assert any(
        "rank 1 cannot exchange by IWP 5 % (OutOfMemoryError: 2 GiB)" in record.message for record in caplog.records
    )


def test_what_is_closed_has_no_residuals_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pilot had the mode, and with it residuals and velocities, as long as somebody had the wrapper."""
    follow(monkeypatch, [1])

    def rank(comm: rp.comm.Communicator) -> None:
        _, optimizer = train(comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, 10)
        lanes = [weakref.ref(lane) for lane in cast(GradientMode, optimizer._mode).exchange._lanes]
        optimizer.close()
        assert optimizer.stats()["auto"]["chosen"] == "IWP 5 %"
        assert not any(lane() for lane in lanes)

    rp.simulate(2, rank)


def test_a_model_that_has_its_optimizer_is_gone_when_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the course when the wrapper goes had the pilot, and with it the model: neither went, ever."""
    follow(monkeypatch, [1])

    def rank(comm: rp.comm.Communicator) -> weakref.ref[nn.Module]:
        model = cast(Any, make_model())
        auto = rp.Auto((rp.Dense(), rp.IWP(0.05)))
        named = model.named_parameters()
        model.optimizer = rp.DistributedOptimizer(sgd(model.parameters()), named, policy=auto, comm=comm, model=model)
        run(model, model.optimizer, comm.rank, 10)
        return weakref.ref(model)

    models = rp.simulate(2, rank)
    gc.collect()
    gc.collect()
    assert not any(model() for model in models)


def test_a_wrapper_that_is_dropped_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its course kept it alive until Python looked for cycles: the model could not be wrapped again, on some ranks."""
    follow(monkeypatch, [1])

    def rank(comm: rp.comm.Communicator) -> bool:
        _, optimizer = train(comm, rp.Auto((rp.Dense(), rp.IWP(0.05))), sgd, 10)
        mode = weakref.ref(optimizer._mode)
        del optimizer
        return mode() is None

    gc.disable()
    try:
        assert all(rp.simulate(2, rank))
    finally:
        gc.enable()


def test_arguments_that_are_not_predicted_are_refused_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ConfigurationError, match="hierarchical=True with policy=Auto"):
            wrap(make_model(), comm, "auto", hierarchical=True)
        with pytest.raises(rp.ConfigurationError, match="guard with policy=Auto"):
            wrap(make_model(), comm, "auto", guard=rp.Guard())

    rp.simulate(2, rank)


def test_one_rank_has_nothing_to_choose() -> None:
    stats = rp.simulate(1, lambda comm: train(comm, "auto", sgd, 4)[1].stats())[0]
    assert not stats["auto"]["deciding"]
    assert stats["auto"]["chosen"] == "dense"
    assert rp.simulate(1, lambda comm: train(comm, rp.Auto((rp.Dense(),)), sgd, 4)[1].stats())[0]["auto"] == {}


def test_adam_trains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, [1, 0])

    def rank(comm: rp.comm.Communicator) -> torch.Tensor:
        model: nn.Module = make_model()
        optimizer = wrap(model, comm, "auto", torch.optim.AdamW)
        run(model, optimizer, comm.rank, 20)
        return weights(model)

    a, b = rp.simulate(2, rank)
    assert torch.equal(a, b)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("at", range(2, 24))
def test_a_step_that_fails_on_one_rank_does_not_part_the_courses(
    at: int, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank left out a step of what auto does, and was in an exchange when the others gathered their times."""
    follow(monkeypatch, [1, 0])  # at some of the steps candidates change

    class Failing(torch.optim.SGD):
        made = fails = 0

        def step(self, closure: Any = None) -> Any:
            self.made += 1
            if self.made == self.fails:
                if moved:  # weights are alike all the same
                    super().step(closure)
                raise MemoryError("made up")
            return super().step(closure)

    def rank(comm: rp.comm.Communicator) -> tuple[list[str], dict[str, Any], torch.Tensor]:
        model, told = make_model(), []
        inner = Failing(model.parameters(), lr=0.05)
        inner.fails = at if comm.rank == 0 else 0
        optimizer = rp.DistributedOptimizer(inner, policy=rp.Auto((rp.Dense(), rp.Dense("bf16"))), comm=comm)
        for batch in batches_of(comm.rank, 30):
            optimizer.zero_grad()
            try:
                loss_of(model, batch).backward()
                optimizer.step()
            except MemoryError as error:
                told.append(str(error))
            except (rp.UsageError, rp.RankMismatchError) as error:
                told.append(str(error))
                rp.broadcast_parameters(model.state_dict(), comm=comm)  # as a checkpoint would
        return told, optimizer.stats()["auto"], weights(model)

    (first, chosen, ours), (second, other, theirs) = rp.simulate(2, rank, timeout=30)
    assert first[0] == "made up"
    assert first[1:] == second
    assert len(second) == 1
    # An exchange that is new then begins with a look at the weights.
    told = "rank 0: MemoryError in step() of the wrapped optimizer: made up" in second[0]
    assert told or (not moved and "other weights" in second[0])
    assert chosen["chosen"] == other["chosen"]
    assert torch.equal(ours, theirs)
