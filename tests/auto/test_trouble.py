"""``policy="auto"`` in trouble while it measures or changes: nothing is lost in silence, no rank goes its own way."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune.auto import pilot
from ringprune.exchange.kept import KeptLane
from ringprune.gradient_mode import GradientMode
from ringprune.momentum import TakenOverMomentum
from ringprune.plan import ParamSpec
from tests.auto.made_up import follow, quick
from tests.training import batches, loss_of, make_model, run, sgd, weights, wrap

POLICY = rp.Auto((rp.Dense(), rp.IWP(0.05)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_rank_without_memory_for_the_last_momentum_keeps_all_of_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What it had taken from SGD until then was gone there, and its next steps were others than those of the others."""
    follow(monkeypatch, [1])
    monkeypatch.setattr(pilot, "LEAST_INTERVAL", 1000)
    adopt, buffer_of, adopting = TakenOverMomentum.adopt, TakenOverMomentum._buffer_of, threading.local()

    def adopts(this: TakenOverMomentum, *only: Any) -> None:
        adopting.now = True
        try:
            adopt(this, *only)
        finally:
            adopting.now = False

    def fails(this: TakenOverMomentum, param: Tensor, spec: ParamSpec) -> Tensor:
        if getattr(adopting, "now", False) and spec.name == name and threading.current_thread().name == "rank 1":
            raise torch.OutOfMemoryError("2 GiB")
        return buffer_of(this, param, spec)

    def rank(comm: rp.comm.Communicator, policy: rp.Policy | rp.Auto) -> tuple[Tensor, str | None]:
        model = make_model()
        optimizer = wrap(model, comm, policy, sgd)
        run(model, optimizer, comm.rank, 12)
        return weights(model), optimizer.stats()["auto"].get("chosen")

    dense = rp.simulate(2, lambda comm: rank(comm, rp.Dense()))
    monkeypatch.setattr(TakenOverMomentum, "adopt", adopts)
    monkeypatch.setattr(TakenOverMomentum, "_buffer_of", fails)
    for trained, chosen in rp.simulate(2, lambda comm: rank(comm, POLICY)):
        assert chosen == "dense"
        assert torch.equal(trained, dense[0][0])


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, nth: int = 0) -> None:
    """Ctrl-C on every rank, at the end of its ``nth`` call."""
    function, calls = getattr(owner, name), threading.local()

    def interrupted(*args: Any, **named: Any) -> Any:
        calls.made = getattr(calls, "made", 0) + 1
        found = function(*args, **named)
        if calls.made == nth + 1:
            raise KeyboardInterrupt
        return found

    patch.setattr(owner, name, interrupted)


def interrupted(model: torch.nn.Module, optimizer: rp.DistributedOptimizer, rank: int, steps: int) -> int:
    """Train until a step is interrupted; its number."""
    for step, batch in enumerate(batches(rank, steps)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        try:
            optimizer.step()
        except KeyboardInterrupt:
            return step
    raise AssertionError("nothing was interrupted")


CHANGES: dict[str, tuple[Any, str, int]] = {
    "a velocity is averaged": (KeptLane, "average_velocity", 0),
    "momentum is given back": (TakenOverMomentum, "give_back", 1),  # first by dense, which it is changed from first
    "what there was is closed": (GradientMode, "hand_over", 0),
    "there is another": (pilot.Pilot, "_build", 0),
    "momentum is taken over": (GradientMode, "take_over", 0),
}


@pytest.mark.parametrize("where", CHANGES)
def test_nothing_is_saved_of_a_change_that_was_broken_off(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A checkpoint was saved that could not be loaded, or training went on without the momentum."""
    follow(monkeypatch, [1, 0])
    interrupt(monkeypatch, *CHANGES[where])

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICY, sgd)
        last = copy.deepcopy(optimizer.state_dict())
        interrupted(model, optimizer, comm.rank, 30)
        for call in (optimizer.state_dict, optimizer.flush, lambda: run(model, optimizer, comm.rank, 1)):
            with pytest.raises(rp.UsageError, match="broken off in the middle"):
                call()
        optimizer.close()
        again = wrap(model, comm, POLICY, sgd)  # nothing of what was half made watches the parameters any more
        again.load_state_dict(last)
        run(model, again, comm.rank, 1)

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize("where", [*CHANGES, "ranks agree"])
def test_statistics_and_loading_say_that_it_was_broken_off(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """They said that it decides, for ever, and what it was about to change to; a checkpoint was loaded into it."""
    follow(monkeypatch, [1, 0])
    interrupt(monkeypatch, *CHANGES.get(where, (pilot.Pilot, "_gather", 3)))

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, POLICY, sgd)
        last = copy.deepcopy(optimizer.state_dict())
        chosen: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            for batch in batches(comm.rank, 30):
                chosen.append(optimizer.stats()["auto"]["chosen"])
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        found, before = optimizer.stats()["auto"], weights(model)
        assert not found["deciding"]
        assert found["said"] == "broken off (KeyboardInterrupt): nothing more is exchanged"
        assert found["chosen"] == chosen[-1]
        with pytest.raises(rp.UsageError, match=r"broke(n)? off.*Start the program again from the last checkpoint"):
            optimizer.load_state_dict(copy.deepcopy(last))
        with pytest.raises(rp.UsageError, match=r"broke(n)? off"):
            run(model, optimizer, comm.rank, 1)
        for call in (lambda: optimizer.load_state_dict(copy.deepcopy(last)), optimizer.flush):
            with pytest.raises(rp.UsageError, match=r"broke(n)? off"):  # and not that synchronize() helps
                call()
        assert torch.equal(weights(model), before)

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize("gathering", range(5))
def test_after_a_measurement_that_was_broken_off_nothing_is_exchanged_and_all_is_saved(
    monkeypatch: pytest.MonkeyPatch, gathering: int
) -> None:
    """Over MPI and Gloo, ranks that had come to different messages of it took these for those of the next step."""
    follow(monkeypatch, [])
    interrupt(monkeypatch, pilot.Pilot, "_gather", gathering)

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, int]:
        model = make_model()
        optimizer = wrap(model, comm, POLICY, sgd)
        made = interrupted(model, optimizer, comm.rank, 30) + 1
        for call in (optimizer.flush, lambda: run(model, optimizer, comm.rank, 1)):
            with pytest.raises(rp.UsageError, match="between two steps"):
                call()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.close()
        model.load_state_dict(saved[0])
        again = wrap(model, comm, POLICY, sgd)
        again.load_state_dict(saved[1])
        run(model, again, comm.rank, 12 - made, start=made)
        return weights(model), made

    def dense(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        run(model, wrap(model, comm, rp.Dense(), sgd), comm.rank, 12)
        return weights(model)

    for trained, made in rp.simulate(2, rank, timeout=30):
        assert made < 12
        assert torch.equal(trained, rp.simulate(2, dense)[0])
