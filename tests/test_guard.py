"""The convergence guard: what it measures, when a tensor is sent whole, and that nothing else changes."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.exchange.relevance import REFRESH
from ringprune.importance import Ratio
from tests.training import make_model, run, same_bytes, sgd, train, weights, wrap

SHAPE = (64, 80)
NUMEL = SHAPE[0] * SHAPE[1]
RAW = {"score": Ratio(damping=0.0)}  # |g / w|: chases small weights
GUARD = rp.Guard(every=5, bound=1.5, growths=2)

STARVING = {
    "shared": rp.IWP(0.02, damping=0.0),
    "all roots, 8 bits": rp.IWP(0.02, damping=0.0, roots="all", values="int8"),
    "look-ahead": rp.IWP(0.02, damping=0.0, lookahead=True),
    "refreshed": rp.IWP(0.02, damping=0.0, refresh=3),
    "ring": rp.IWP(0.02, damping=0.0, reduction="ring"),
    "explored by rank": replace(rp.SlimDP(0.02, explore_by="rank"), explore=0.1, refresh=1, **RAW),
    "gathered": replace(rp.DGC(0.02), **RAW),
    "scattered": replace(rp.DGC(0.02, index_sets="scattered"), **RAW),
    "balanced": replace(rp.OkTopk(0.02), **RAW),
    "clipped": rp.IWP(0.02, damping=0.0, clip_norm=1e6),
}


class TwoMatrices:
    """A wrapped SGD of two matrices: the first has weights near zero that a raw ratio never gets past.

    Args:
        comm: the communicator.
        policy: the policy.
        options: of the wrapper.
    """

    def __init__(self, comm: rp.comm.Communicator, policy: rp.Policy, momentum: float = 0.0, **options: Any) -> None:
        draw = torch.Generator().manual_seed(7)
        starved = torch.randn(SHAPE, generator=draw).sign()
        starved.view(-1)[:200] = 1e-12
        self.named = {
            "starved": nn.Parameter(starved),
            "fed": nn.Parameter(torch.randn(SHAPE, generator=draw).sign()),
        }
        self.comm = comm
        inner = torch.optim.SGD(self.named.values(), lr=1e-20, momentum=momentum)
        self.optimizer = rp.DistributedOptimizer(inner, self.named.items(), policy=policy, comm=comm, **options)
        self.given = {name: torch.zeros(NUMEL, dtype=torch.float64) for name in self.named}
        self.sent = {name: torch.zeros(NUMEL, dtype=torch.float64) for name in self.named}

    def gradient(self, name: str, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * self.comm.rank + 10 * step + len(name))
        own = torch.randn(SHAPE, generator=draw)
        # Of what ranks have in common the fed matrix is sent a part that is as large as the rest, at every step.
        return own + torch.randn(SHAPE, generator=torch.Generator().manual_seed(len(name)))

    def step(self, step: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        grads = {name: self.gradient(name, step) for name in self.named}
        loss = sum((param * grads[name]).sum() for name, param in self.named.items())
        (loss * factor).backward()
        self.optimizer.step()
        for name, param in self.named.items() if factor == 1.0 else ():
            assert param.grad is not None
            self.given[name] += grads[name].view(-1).double()
            self.sent[name] += param.grad.view(-1).double()

    def run(self, steps: int, start: int = 0) -> "TwoMatrices":
        for step in range(start, start + steps):
            self.step(step)
        return self

    def kept(self, name: str, kind: str = "residual") -> Tensor:
        tensor: Tensor = self.optimizer.state_dict()["ringprune"]["parameters"][name][kind]
        return tensor.flatten()

    def whole(self) -> list[str]:
        return [name for name, found in self.optimizer.stats()["guard"].items() if found["whole"]]


# -- backing off ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", STARVING)
def test_a_tensor_whose_residual_grows_is_sent_whole_on_all_ranks_from_one_step_on(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[list[list[str]], list[Tensor], dict[str, Any], float]:
        run_ = TwoMatrices(comm, STARVING[policy], guard=GUARD)
        history, averages = [], []
        for step in range(32):
            run_.step(step)
            history.append(run_.whole())
            assert run_.named["starved"].grad is not None
            averages.append(run_.named["starved"].grad.clone())
        return history, averages, run_.optimizer.stats(), float(run_.kept("starved").norm())

    results = rp.simulate(3, rank)
    history, averages, stats, _ = results[0]
    assert all(other[0] == history for other in results)
    assert history[0] == [] and history[-1] == ["starved"]
    turned = history.index(["starved"])
    assert turned % 5 == 0 and turned >= 10, "at a check, after it has grown at two"
    for r in results:
        assert all(torch.equal(a, b) for a, b in zip(r[1], averages, strict=True))
        assert r[3] == 0.0, "nothing is kept back of it"
    assert int((averages[turned] == 0).sum()) > 0.9 * NUMEL
    assert int((averages[turned + 1] == 0).sum()) == 0 and float(averages[turned + 1].norm()) > 300
    assert float(averages[-1].norm()) < 200, "what had been kept back was sent at once"
    told = stats["guard"]["starved"]
    assert told["step"] == 30 and told["whole"] and not stats["guard"]["fed"]["whole"]


@pytest.mark.parametrize("policy", ["shared", "all roots, 8 bits", "explored by rank", "gathered", "balanced"])
def test_nothing_is_lost_when_a_tensor_turns_whole(policy: str) -> None:
    """Law 1, across the turn, for it and for its neighbour."""

    def rank(comm: rp.comm.Communicator) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        run_ = TwoMatrices(comm, STARVING[policy], guard=GUARD).run(25)
        assert run_.whole() == ["starved"]
        return {name: (run_.given[name], run_.sent[name], run_.kept(name).double()) for name in run_.named}

    results = rp.simulate(3, rank)
    for name in ("starved", "fed"):
        given, kept = (sum(r[name][i] for r in results) for i in (0, 2))
        error = (given - 3 * results[0][name][1] - kept).abs()
        assert float(error.max()) < 25 * 8 * 2**-24 * 200  # roundings of numbers below 200


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_tensor_sent_whole_keeps_its_velocity(refresh: int) -> None:
    """As at density 1 it is plain momentum; until the next refresh its entries in the old set were still cleared."""

    def rank(comm: rp.comm.Communicator) -> None:
        run_ = TwoMatrices(comm, rp.IWP(0.02, damping=0.0, refresh=refresh), momentum=0.5, guard=GUARD)
        step = 0
        while not run_.whole():
            run_.step(step)
            step += 1
            assert step < 60, "it never turned whole"
        assert run_.whole() == ["starved"]
        before = run_.kept("starved", "velocity").clone()
        run_.step(step)
        expected = 0.5 * before + run_.gradient("starved", step).view(-1)
        assert torch.allclose(run_.kept("starved", "velocity"), expected, atol=1e-6)

    rp.simulate(2, rank)


def test_all_tensors_of_a_bucket_may_turn_whole() -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[int, float]:
        guard = rp.Guard(every=2, bound=1e-6, growths=1)
        run_ = TwoMatrices(comm, rp.IWP(0.02), guard=guard).run(10)
        assert run_.whole() == ["starved", "fed"] or run_.whole() == ["fed", "starved"]
        before = run_.optimizer.stats()["bytes_indices"]
        run_.step(10)
        stats = run_.optimizer.stats()
        assert stats["bytes_indices"] == before
        assert not run_.kept("fed").any()
        return 0, 0.0

    rp.simulate(2, rank)


def test_one_line_says_which_why_and_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ringprune"):
        rp.simulate(4, lambda comm: TwoMatrices(comm, STARVING["shared"], guard=GUARD).run(30) and None)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("'starved' is sent whole from now on: what is kept back of it has grown at 2 checks")
    assert f"It costs {8 * 3 / 4 * NUMEL:.0f} bytes per exchange and rank instead of" in lines[0]


def test_bytes_after_the_turn_are_those_of_the_whole_tensor_and_no_index() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        guarded = TwoMatrices(comm, STARVING["shared"], guard=GUARD).run(21)
        bytes_of = [guarded.optimizer.stats()["parameters"][name] for name in ("starved", "fed")]
        sent = guarded.optimizer.stats()
        guarded.step(21)
        after = guarded.optimizer.stats()
        k = round(0.02 * NUMEL)
        share = (comm.size - 1) / comm.size
        assert after["bytes_values"] - sent["bytes_values"] == pytest.approx(8 * share * (NUMEL + k))
        assert after["bytes_headers"] - sent["bytes_headers"] == pytest.approx(24 * share)
        assert after["parameters"]["starved"]["values"] > bytes_of[0]["values"] > bytes_of[1]["values"]

    rp.simulate(3, rank)


# -- what it measures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["shared", "gathered", "balanced", "explored by rank"])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_its_numbers_are_those_of_the_definition(policy: str, op: str) -> None:
    size, check = 3, 4

    def rank(comm: rp.comm.Communicator) -> Any:
        run_ = TwoMatrices(comm, STARVING[policy], guard=rp.Guard(every=check), op=op).run(check)
        before = run_.kept("fed") + run_.gradient("fed", check).view(-1)
        run_.step(check)
        assert run_.named["fed"].grad is not None
        return before.double(), run_.named["fed"].grad.view(-1).double(), run_.optimizer.stats()["guard"]["fed"]

    results = rp.simulate(size, rank)
    dense, exchanged = sum(r[0] for r in results) / size, results[0][1] / (size if op == "sum" else 1)
    residual, share = sum(float(r[0].norm()) for r in results) / size, round(0.02 * NUMEL) / NUMEL
    found = results[0][2]
    assert all(r[2] == found for r in results)
    assert found["step"] == check and found["growths"] == 0
    assert found["residual"] == pytest.approx(residual, rel=1e-5)
    assert found["exchanged"] == pytest.approx(float(exchanged.norm()), rel=1e-5)
    assert found["cosine"] == pytest.approx(float(dense @ exchanged / dense.norm() / exchanged.norm()), abs=1e-4)
    assert found["ratio"] == pytest.approx(residual / float(exchanged.norm()) / math.sqrt(size / share), rel=1e-5)


def test_budgets_by_relevance_are_judged_each_by_its_own_share() -> None:
    """A random choice has 1, also of a tensor to which relevance leaves a hundredth of the bucket's density."""
    policy, entries = replace(rp.RandomK(0.1), layers="relevance"), {}

    def rank(comm: rp.comm.Communicator) -> dict[str, dict[str, float]]:
        run_ = TwoMatrices(comm, policy, guard=rp.Guard(every=REFRESH, bound=3.0, growths=1))
        run_.named["fed"].data.mul_(0.01)
        run_.run(2 * REFRESH + 1)
        entries.update({name: int(param.grad.count_nonzero()) for name, param in run_.named.items()})
        return dict(run_.optimizer.stats()["guard"])

    found = rp.simulate(2, rank)[0]
    assert entries["fed"] < 0.02 * NUMEL < 0.15 * NUMEL < entries["starved"]
    for each in found.values():
        assert 0.5 < each["ratio"] < 1.5 and not each["whole"]


def test_healthy_choices_stay_below_the_bound() -> None:
    """A ratio of 1 is a random choice; nothing of what has a residual at its steady state is backed off."""
    for policy, most in ((rp.IWP(0.05, roots="all"), 0.9), (rp.RandomK(0.05), 1.2), (rp.DGC(0.05), 0.9)):
        stats = rp.simulate(4, lambda comm, p=policy: train(comm, p, sgd, 120, guard=rp.Guard(every=10))[1].stats())[0]
        assert len(stats["guard"]) == 2
        for found in stats["guard"].values():
            assert found["ratio"] < most and not found["whole"]


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_off_it_costs_nothing_and_on_one_dense_allreduce_per_check() -> None:
    def rank(comm: rp.comm.Communicator, guard: rp.Guard | None) -> tuple[Tensor, dict[str, Any], float]:
        start = comm.traffic.bytes_sent
        got, optimizer = train(comm, rp.IWP(0.05), sgd, 13, guard=guard)
        return got, optimizer.stats(), comm.traffic.bytes_sent - start

    off, never, on = (
        rp.simulate(3, lambda comm, g=guard: rank(comm, g))[0]
        for guard in (None, rp.Guard(every=1000), rp.Guard(every=5))
    )
    assert off[1]["guard"] == never[1]["guard"] == {} and off[2] == never[2]
    assert same_bytes(off[0], on[0]), "a look changes nothing"
    packed, tensors, checks = 7168, 2, 2
    assert on[2] - off[2] == pytest.approx(checks * 2 * 2 / 3 * 4 * (packed + tensors))
    assert on[1]["bytes_headers"] - off[1]["bytes_headers"] == pytest.approx(on[2] - off[2])


# -- skipped steps, checkpoints, modes --------------------------------------------------------------------------------


def test_a_skipped_step_leaves_no_trace() -> None:
    """Neither at a check nor once a tensor is sent whole."""

    def rank(comm: rp.comm.Communicator, bad: tuple[int, ...]) -> tuple[Tensor, Tensor, list[str]]:
        run_ = TwoMatrices(comm, STARVING["shared"], momentum=0.5, guard=GUARD, nonfinite="skip")
        for step in range(24):
            if step in bad:
                run_.step(99, factor=math.nan if comm.rank == 1 else 2.0)
            run_.step(step)
        state = run_.optimizer.state_dict()["ringprune"]["parameters"]
        return (
            torch.cat([t.flatten().double() for e in state.values() for t in e.values()]),
            run_.sent["fed"],
            run_.whole(),
        )

    good, spoilt = (rp.simulate(3, lambda comm, b=bad: rank(comm, b)) for bad in ((), (5, 10, 20, 22)))
    assert good[0][2] == ["starved"]
    for a, b in zip(good, spoilt, strict=True):
        assert same_bytes(a[0], b[0]) and same_bytes(a[1], b[1])


@pytest.mark.parametrize("policy", ["shared", "look-ahead", "refreshed", "gathered", "balanced"])
@pytest.mark.parametrize("stop", [7, 12, 18])
def test_resuming_is_the_same_as_not_stopping(policy: str, stop: int) -> None:
    """Before the first growth is known, between two, and after the decision."""

    def rank(comm: rp.comm.Communicator, stop: int | None) -> tuple[list[list[str]], Tensor]:
        run_ = TwoMatrices(comm, STARVING[policy], guard=GUARD)
        history: list[list[str]] = []
        for step in range(26):
            if step == stop:
                saved = run_.optimizer.state_dict()
                run_ = TwoMatrices(comm, STARVING[policy], guard=GUARD)
                run_.optimizer.load_state_dict(saved)
            run_.step(step)
            state = run_.optimizer.state_dict()["ringprune"]["parameters"]
            history.append([name for name, entry in state.items() if entry["guard"][0]])
        return history, torch.cat([run_.kept(name) for name in run_.named])

    straight, resumed = (rp.simulate(2, lambda comm, s=s: rank(comm, s)) for s in (None, stop))
    for a, b in zip(straight, resumed, strict=True):
        assert a[0] == b[0] and a[0][-1] == ["starved"]
        assert same_bytes(a[1], b[1])


def test_a_checkpoint_from_before_the_guard_can_be_loaded_and_one_with_it_needs_it() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        plain = TwoMatrices(comm, STARVING["shared"]).run(3)
        guarded = TwoMatrices(comm, STARVING["shared"], guard=GUARD).run(20)
        assert guarded.kept("starved", "guard")[0] == 1
        saved = guarded.optimizer.state_dict()
        guarded.optimizer.load_state_dict(plain.optimizer.state_dict())
        assert not guarded.kept("starved", "guard").any(), "a run without decisions goes on"
        with pytest.raises(rp.CheckpointError, match=r"Unexpected: .*starved\.guard"):
            plain.optimizer.load_state_dict(saved)

    rp.simulate(1, rank)


def test_local_steps_are_guarded_too() -> None:
    def rank(comm: rp.comm.Communicator) -> list[str]:
        policy = rp.IWP(0.02, damping=0.0, local_steps=2)
        run_ = TwoMatrices(comm, policy, guard=GUARD)
        for group in run_.optimizer.param_groups:
            group["lr"] = 1e-6
        for step in range(40):
            run_.optimizer.zero_grad()
            sum((param * run_.gradient(name, step)).sum() for name, param in run_.named.items()).backward()
            run_.optimizer.step()
        return run_.whole()

    assert rp.simulate(2, rank) == [["starved"]] * 2


@pytest.mark.parametrize("policy", ["shared", "balanced"])
def test_in_a_hierarchy_the_nodes_decide(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[list[str], Tensor]:
        run_ = TwoMatrices(comm, STARVING[policy], guard=GUARD, hierarchical=True).run(25)
        return run_.whole(), run_.sent["starved"]

    results = rp.simulate(4, rank, ranks_per_node=2)
    assert [r[0] for r in results] == [["starved"], [], ["starved"], []]
    assert all(same_bytes(r[1], results[0][1]) for r in results)


def test_warm_up_is_not_looked_at() -> None:
    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        policy = rp.IWP(0.02, damping=0.0, warmup=rp.Warmup(1000))
        return TwoMatrices(comm, policy, guard=GUARD).run(12).optimizer.stats()["guard"]

    assert rp.simulate(2, rank)[0] == {}


def test_it_goes_with_checks_of_drift_and_flushes() -> None:
    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05), guard=rp.Guard(every=3, bound=1e-9, growths=1), check_every=2)
        run(model, optimizer, comm.rank, 10)
        optimizer.flush()
        run(model, optimizer, comm.rank, 4, start=10)
        assert all(found["whole"] for found in optimizer.stats()["guard"].values())
        return weights(model)

    results = rp.simulate(3, rank)
    assert all(same_bytes(result, results[0]) for result in results)


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"every": 0}, "Guard.every=0"), ({"bound": 0.0}, "Guard.bound=0.0"), ({"growths": 0}, "Guard.growths=0")],
)
def test_settings_out_of_range(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=said):
        rp.Guard(**wrong)


def test_what_is_no_guard_is_refused_and_guards_must_be_alike() -> None:
    def typed(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ArgumentTypeError, match=r"guard=50: a ringprune\.Guard"):
            wrap(make_model(), comm, "iwp", guard=50)

    def alike(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.RankMismatchError, match=r"guard=Guard\(every=7"):
            wrap(make_model(), comm, "iwp", guard=rp.Guard(every=7) if comm.rank else None)

    rp.simulate(1, typed)
    rp.simulate(2, alike)


@pytest.mark.parametrize("policy", [rp.MIPD(smoothing=0.0), rp.MIPD(turns=1), rp.ScaleCom()])
def test_a_guard_is_refused_where_an_exchange_is_not_all_that_moves_a_tensor(policy: rp.Policy) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.ConfigurationError, match=r"smoothing=0, turns=1 and low_pass=1"):
            wrap(make_model(), comm, policy, guard=rp.Guard())

    rp.simulate(1, rank)
