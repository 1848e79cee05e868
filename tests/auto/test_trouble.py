"""``policy="auto"`` in trouble while it measures or changes: nothing is lost in silence, no rank goes its own way."""

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune.auto import pilot
from ringprune.momentum import TakenOverMomentum
from tests.auto.made_up import follow, quick
from tests.training import make_model, run, sgd, weights, wrap

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
    adopt, allocate, adopting = TakenOverMomentum.adopt, TakenOverMomentum.allocate, threading.local()

    def adopts(this: TakenOverMomentum) -> None:
        adopting.now = True
        try:
            adopt(this)
        finally:
            adopting.now = False

    def fails(this: TakenOverMomentum, names: Iterable[str]) -> None:
        wanted = list(names)
        if getattr(adopting, "now", False) and name in wanted and threading.current_thread().name == "rank 1":
            raise torch.OutOfMemoryError("2 GiB")
        allocate(this, wanted)

    def rank(comm: rp.comm.Communicator, policy: rp.Policy | rp.Auto) -> tuple[Tensor, str | None]:
        model = make_model()
        optimizer = wrap(model, comm, policy, sgd)
        run(model, optimizer, comm.rank, 12)
        return weights(model), optimizer.stats()["auto"].get("chosen")

    dense = rp.simulate(2, lambda comm: rank(comm, rp.Dense()))
    monkeypatch.setattr(TakenOverMomentum, "adopt", adopts)
    monkeypatch.setattr(TakenOverMomentum, "allocate", fails)
    for trained, chosen in rp.simulate(2, lambda comm: rank(comm, POLICY)):
        assert chosen == "dense"
        assert torch.equal(trained, dense[0][0])
