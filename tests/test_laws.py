"""The laws of an exchange, on simulated ranks; tests/mpi holds them on real ones."""

import copy
import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ringprune as rp
from ringprune.wire import index_code, value_code
from tests.training import (
    OPTIMIZERS,
    adamw,
    batches,
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

RANKS = [1, 2, 3, 4, 8]
EPS = torch.finfo(torch.float32).eps
POLICIES = {
    "one root": rp.IWP(0.05),
    "all roots": rp.IWP(0.05, roots="all"),
    "explore": rp.IWP(0.05, explore=0.5),
    "raw ratio, velocity kept": rp.IWP(0.05, damping=0.0, mask_velocity=False),
    "error feedback": rp.IWP(0.05, correction="global"),
    "clipped": rp.IWP(0.05, clip_norm=0.1),
    "clipped per tensor": rp.IWP(0.05, clip_norm_per_tensor=0.05),
    "warm-up": rp.IWP(0.05, warmup=rp.Warmup(6)),
    "dense": rp.Dense(),
    "16 bits": rp.IWP(0.05, values="bf16", dense_values="fp16", warmup=rp.Warmup(6)),
    "8 bits": rp.IWP(0.05, roots="all", values="int8", dense_values="int8", correction="global"),
    "4 bits": rp.IWP(0.05, values="int4", dense_values="int4", index_format="bitmap"),
    "books": rp.IWP(0.05, values="book4", dense_values="book2"),
    "ring": rp.IWP(0.05, reduction="ring"),
    "ring in 8 bits": rp.IWP(0.05, values="int8", dense_values="int4", reduction="ring"),
    "look-ahead": rp.IWP(0.05, lookahead=True, warmup=rp.Warmup(4)),
    "look-ahead in 8 bits": rp.IWP(0.05, roots="all", lookahead=True, values="int8", dense_values="int8", explore=0.3),
    "dense in 16 bits": rp.Dense("bf16"),
    "random": rp.RandomK(0.05, values="fp16", correction="local"),
    "own sets": rp.DGC(0.05, warmup=rp.Warmup(6)),
    "own sets, scattered": rp.DGC(0.05, index_sets="scattered", dense_values="int8"),
    "balanced": rp.OkTopk(0.05, warmup=rp.Warmup(6)),
    "balanced in 16 bits": rp.OkTopk(0.05, correction="local", values="bf16", dense_values="fp16"),
    "balanced in 8 bits": rp.OkTopk(0.01, correction="local", values="int8", dense_values="int8"),
    "cyclic root, low-pass": rp.ScaleCom(0.05, warmup=rp.Warmup(4)),
    "low-pass in 4 bits": rp.ScaleCom(0.05, low_pass=0.3, correction="local", values="int4", dense_values="int8"),
    "core and explored": rp.SlimDP(0.05, refresh=4),
    "core and each rank's own": rp.SlimDP(0.05, refresh=3, explore_by="rank", roots="all", warmup=rp.Warmup(3)),
    "refreshed every 5": rp.IWP(0.05, refresh=5, values="int8", warmup=rp.Warmup(7)),
    "refreshed, look-ahead": rp.IWP(0.05, refresh=3, lookahead=True, explore=0.3),
    "own sets, sampled": rp.DGC(0.05, selection="sampled", correction="global"),
    "sampled, look-ahead": replace(rp.IWP(0.05, roots="all", lookahead=True, values="int8"), selection="sampled"),
    "rank's own, look-ahead": replace(rp.IWP(0.05, refresh=2, lookahead=True, explore=0.5), explore_by="rank"),
    "relevance, estimate, turns": rp.MIPD(0.05, smoothing=0.2),
    "the same on the ring": rp.MIPD(0.05, smoothing=0.2, turns=3, dense_values="book2", reduction="ring"),
    "estimate, look-ahead": replace(rp.IWP(0.05, lookahead=True, roots="all", values="int8"), smoothing=0.1),
    "core in turns": replace(rp.SlimDP(0.05, refresh=3, warmup=rp.Warmup(3)), layers="relevance", turns=2),
}


# -- 1. conservation --------------------------------------------------------------------------------------------------


CONSERVING = (
    *("one root", "all roots", "16 bits", "8 bits", "4 bits", "books", "dense in 16 bits", "own sets, sampled"),
    *("core and explored", "core and each rank's own", "refreshed every 5", "rank's own, look-ahead"),
    *("balanced", "balanced in 16 bits", "balanced in 8 bits"),
    *("relevance, estimate, turns", "the same on the ring", "estimate, look-ahead", "core in turns"),
)
KEEPING = {name: POLICIES[name] for name in CONSERVING}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("policy", KEEPING)
@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_what_is_sent_and_what_is_kept_is_what_came_in(size: int, policy: str, name: str) -> None:
    """With a plain SGD of rate 1 the weights move by what was sent; residuals hold the rest of every gradient."""
    steps = 8
    keeps = name == "0.weight" or KEEPING[policy].dense_values != "fp32"

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = make_model()
        layer = model.get_parameter(name)
        gradients = torch.zeros_like(layer, dtype=torch.float64)
        bulk = torch.zeros_like(gradients)
        optimizer = wrap(model, comm, KEEPING[policy], lambda p: torch.optim.SGD(p, lr=1.0))
        before = layer.detach().double()
        sent = torch.zeros_like(gradients)
        for batch in batches(comm.rank, steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            gradients += torch.autograd.grad(loss, layer, retain_graph=True)[0].double()
            bulk += gradients.abs()
            loss.backward()
            optimizer.step()
            sent += comm.size * layer.grad.double()
        entry = optimizer.state_dict()["ringprune"]["parameters"].get(name, {})
        kept = entry["residual"].double() if keeps else torch.zeros_like(gradients)
        assert torch.allclose(before - layer.detach().double(), sent / comm.size, atol=steps * EPS)
        return gradients, bulk, sent, kept

    results = rp.simulate(size, rank)
    came_in = sum(r[0] for r in results)
    sent, kept = results[0][2], sum(r[3] for r in results)
    # Each of a rank's additions rounds by at most EPS/2 of the running sum; so do the sum over ranks and its mean.
    bound = EPS * (sum(r[1] for r in results) + (size + 2) * came_in.abs() + (size + 2) * sent.abs())
    assert ((came_in - sent - kept).abs() <= bound).all()
    assert (kept.abs().max() > 0) == keeps and sent.abs().max() > 0


@pytest.mark.parametrize(
    "policy",
    ["one root", "all roots", "explore", "error feedback", "16 bits", "4 bits", "own sets", "balanced in 16 bits"],
)
def test_flush_leaves_nothing_behind(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
        run(model, optimizer, comm.rank, 5)
        kept = optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["residual"].double()
        before = model[0].weight.detach().double()
        optimizer.flush()
        state = optimizer.state_dict()["ringprune"]
        return kept, before - model[0].weight.detach().double(), state

    results = rp.simulate(3, rank)
    mean = sum(kept for kept, _, _ in results) / 3
    if policy != "error feedback":  # there SGD's own momentum takes part in the step
        assert torch.allclose(results[0][1], mean, atol=8 * EPS)
    for _, _, state in results:  # of coded dense tensors the rounding of the last step stays, the same on all ranks
        packed = [entry for name, entry in state["parameters"].items() if name in ("0.weight", "2.weight")]
        assert not any(entry["residual"].any() for entry in packed)
    for name, entry in results[0][2]["parameters"].items():
        for kind, tensor in entry.items():
            assert same_bytes(tensor, results[1][2]["parameters"][name][kind]), (name, kind)


# -- 2. transparency --------------------------------------------------------------------------------------------------


def reference(comm: rp.comm.Communicator, make: Any, steps: int) -> tuple[Tensor, float]:
    """Data-parallel training by hand: sum every gradient, multiply by 1/P, step; and the largest gradient seen."""
    model = make_model()
    optimizer = make(model.parameters())
    largest = 0.0
    for batch in batches(comm.rank, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            comm.allreduce(param.grad, name=name).wait()
            param.grad.mul_(1 / comm.size)
            largest = max(largest, float(param.grad.abs().max()))
        optimizer.step()
    return weights(model), largest


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_is_plain_data_parallel_training_to_the_bit(size: int, name: str) -> None:
    make = OPTIMIZERS[name]
    expected = rp.simulate(size, lambda comm: reference(comm, make, 50))
    got = rp.simulate(size, lambda comm: train(comm, rp.Dense(), make, 50)[0])
    for rank in range(size):
        assert same_bytes(got[rank], expected[0][0])


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_one_is_plain_training_up_to_the_order_of_sums(size: int, name: str) -> None:
    """Momentum before or after the sum over the ranks differs by rounding only.

    A step's error is at most (P + 4) roundings of the summed velocity, which is at most 1 / (1 - m) gradients; it moves
    the weights by lr times that (AdamW: by 2 lr / eps times the gradient's error). Errors add up over the steps and
    the loss is convex enough at these rates not to amplify them more than twofold.
    """
    steps, make = 50, OPTIMIZERS[name]
    expected = rp.simulate(size, lambda comm: reference(comm, make, steps))
    got = rp.simulate(size, lambda comm: train(comm, rp.IWP(1.0), make, steps)[0])
    group = make([torch.zeros(1)]).param_groups[0]
    gain = 2 / group["eps"] if name == "adamw" else 1 / (1 - group["momentum"])
    bound = 2 * steps * group["lr"] * gain * (size + 4) * EPS * expected[0][1]
    assert (got[0] - expected[0][0]).abs().max() <= bound + 4 * EPS * expected[0][0].abs().max()


# -- 3. agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_the_same_bytes_on_every_rank_after_every_step(size: int, policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], nesterov, bucket_bytes=20_000)
        history = []
        for batch in batches(comm.rank, 12):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            history.append(weights(model))
        return history

    histories = rp.simulate(size, rank)
    for history in histories[1:]:
        assert all(same_bytes(a, b) for a, b in zip(history, histories[0], strict=True))
    assert not same_bytes(histories[0][0], histories[0][-1])


# -- 4. bytes ---------------------------------------------------------------------------------------------------------


def sent_as(values: str, count: int, size: int) -> int:
    """Payload of ``count`` values, those of all regions together, which travels twice."""
    code = value_code(values)
    regions = [count * (r + 1) // size - count * r // size for r in range(size)]
    coded = code is not None and code.size(max(regions)) < 4 * max(regions)
    return sum(code.size(n) for n in regions) if code is not None and coded else 4 * count


@pytest.mark.parametrize(("size", "roots"), [(1, 1), (2, 1), (2, "all"), (3, 2), (4, 1), (4, 2), (8, 1), (8, "all")])
@pytest.mark.parametrize(("density", "values"), [(0.01, "fp32"), (0.05, "int8"), (0.05, "bf16"), (0.5, "fp32")])
def test_bytes_are_those_of_the_formula(size: int, roots: Any, density: float, values: str) -> None:
    steps, big, small = 5, [64 * 64, 48 * 64], 64 + 48 + 10 + 480

    def rank(comm: rp.comm.Communicator) -> tuple[dict[str, Any], float]:
        traffic = comm.traffic
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(density, roots=roots, values=values, dense_values=values))
        start = traffic.bytes_sent
        run(model, optimizer, comm.rank, steps)
        return optimizer.stats(), traffic.bytes_sent - start

    count = size if roots == "all" else roots
    proposed = sum(math.ceil(max(1, round(density * n)) / count) for n in big)
    share = (size - 1) / size
    results = rp.simulate(size, rank)
    assert all(stats["bytes_sent"] == pytest.approx(counted, rel=1e-12) for stats, counted in results)
    # Of coded values a rank sends all regions but its own, which may be some bytes longer or shorter than the others'.
    mean = {key: sum(stats[key] for stats, _ in results) / size for key in results[0][0] if key.startswith("bytes")}
    stats = results[0][0]
    assert mean["bytes_indices"] == pytest.approx(steps * count * share * index_code(proposed, sum(big)).size)
    selected = stats["realised_density"] * sum(big)  # mean over the steps
    assert proposed <= round(selected) <= count * proposed
    if values == "fp32":
        assert mean["bytes_values"] == pytest.approx(steps * 2 * share * 4 * selected)
    elif count == 1:
        assert round(selected) == proposed
        assert mean["bytes_values"] == pytest.approx(steps * 2 * share * sent_as(values, proposed, size))
    assert mean["bytes_dense"] == pytest.approx(steps * 2 * share * sent_as(values, small, size))
    # The verdict of every step, and once a barrier and 8 bytes per parameter, for the step and the momentum.
    assert mean["bytes_headers"] == pytest.approx(steps * 2 * share * 12 + (size - 1) * (4 + 8 * (6 + 2)))
    assert stats["dense_equivalent_bytes"] == pytest.approx(steps * 2 * share * 4 * (sum(big) + small))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_byte_is_attributed(policy: str) -> None:
    """What the communicator counted during the steps stands in stats(); the ring's bytes once did only in part."""

    def rank(comm: rp.comm.Communicator) -> tuple[float, float]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy])
        start = comm.traffic.bytes_sent
        run(model, optimizer, comm.rank, 4)
        return optimizer.stats()["bytes_sent"], comm.traffic.bytes_sent - start

    for told, counted in rp.simulate(3, rank):
        assert told == pytest.approx(counted, rel=1e-12)


def test_bytes_do_not_grow_with_the_ranks() -> None:
    """Per rank they are 2 (P-1)/P of the values and (P-1)/P of one root's indices, for 64 ranks as for 2."""

    def per_share(size: int) -> list[float]:
        results = rp.simulate(size, lambda comm: train(comm, rp.IWP(0.05), steps=2)[1].stats())
        share = (size - 1) / size
        return [results[0][f"bytes_{content}"] / share for content in ("values", "indices", "dense")]

    assert per_share(64) == pytest.approx(per_share(2))


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_the_parameters_add_up(policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        _, optimizer = train(comm, POLICIES[policy], steps=8)
        optimizer.flush()
        stats = optimizer.stats()
        for content in ("values", "indices", "dense", "headers"):
            parts = [entry[content] for entry in stats["parameters"].values()]
            assert sum(parts) == pytest.approx(stats[f"bytes_{content}"])
        assert set(stats["parameters"]) == {name for name, _ in make_model().named_parameters()}

    rp.simulate(3, rank)


@given(st.floats(0.001, 0.6), st.integers(0, 6), st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_ratios_are_ratios_of_the_bytes(density: float, warmup: int, size: int) -> None:
    policy = rp.IWP(density, warmup=rp.Warmup(warmup) if warmup else None)
    for _, optimizer in rp.simulate(size, lambda comm: train(comm, policy, steps=8)):
        stats = optimizer.stats()
        parts = [stats[f"bytes_{content}"] for content in ("values", "indices", "dense", "headers")]
        assert stats["bytes_sent"] == pytest.approx(sum(parts))
        assert stats["wire_ratio"] == pytest.approx(stats["dense_equivalent_bytes"] / stats["bytes_sent"])
        assert stats["value_ratio"] == pytest.approx(stats["dense_equivalent_bytes"] / (parts[0] + parts[2]))
        assert stats["steady_wire_ratio"] >= stats["wire_ratio"] * (1 - 1e-9) or not warmup
        assert stats["density"] == density and stats["steps"] == 8


def test_one_rank_reports_the_ratio_of_payloads() -> None:
    [(_, optimizer)] = rp.simulate(1, lambda comm: train(comm, rp.IWP(0.01), steps=3))
    stats = optimizer.stats()
    assert stats["bytes_sent"] == 0
    payload = index_code(41 + 31, 7168).size + 4 * (41 + 31 + 602) + 12
    assert stats["wire_ratio"] == pytest.approx(3 * 4 * (7168 + 602) / (3 * payload + 8 * (6 + 2)))


# -- 5. determinism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_bytes(policy: str) -> None:
    first, second = (rp.simulate(3, lambda comm: train(comm, POLICIES[policy], seed=7, steps=8)[0]) for _ in range(2))
    assert same_bytes(first[0], second[0])


def test_another_seed_chooses_other_roots() -> None:
    results = [rp.simulate(4, lambda comm, s=seed: train(comm, rp.IWP(0.05), seed=s)[0])[0] for seed in (0, 1)]
    assert not same_bytes(*results)


def test_buckets_and_overlap_change_no_bits() -> None:
    """Where bucket borders lie moves roots, so all ranks propose; the order of sums over ranks stays."""
    policy = rp.IWP(0.05, roots="all")
    runs = [
        rp.simulate(3, lambda comm, o=options: train(comm, policy, nesterov, **o)[0])[0]
        for options in ({}, {"overlap": False}, {"bucket_bytes": 1}, {"bucket_bytes": 1, "overlap": False})
    ]
    assert all(same_bytes(run_, runs[0]) for run_ in runs[1:])


# -- 6. resume --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_resuming_is_the_same_as_not_stopping(policy: str, name: str) -> None:
    make = OPTIMIZERS[name]

    def straight(comm: rp.comm.Communicator) -> Tensor:
        return train(comm, POLICIES[policy], make, 20)[0]

    def resumed(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], make)
        run(model, optimizer, comm.rank, 9)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        again = make_model(seed=5)
        other = wrap(again, comm, POLICIES[policy], make)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        run(again, other, comm.rank, 11, start=9)
        return weights(again)

    expected, got = rp.simulate(3, straight), rp.simulate(3, resumed)
    assert all(same_bytes(a, b) for a, b in zip(expected, got, strict=True))


def test_a_flushed_checkpoint_of_any_rank_serves_any_number_of_ranks() -> None:
    def save(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05), nesterov)
        run(model, optimizer, comm.rank, 6)
        optimizer.flush()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    saved = rp.simulate(4, save)

    def load(comm: rp.comm.Communicator) -> Tensor:
        model = make_model(seed=9)
        optimizer = wrap(model, comm, rp.IWP(0.05), nesterov)
        state = saved[3 - comm.rank]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run(model, optimizer, comm.rank, 4)
        return weights(model)

    results = rp.simulate(2, load)
    assert same_bytes(*results)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "policy",
    [
        rp.IWP(1.0, min_numel=1),
        rp.IWP(0.5, min_numel=1, mask_velocity=False),
        replace(rp.IWP(1.0, min_numel=1, correction="global"), smoothing=0.5),
    ],
)
def test_sums_go_on_the_same_on_another_number_of_ranks(policy: rp.policies.Policy, size: int) -> None:
    """What ranks have of a sum depends on their number: velocities counted as often as there are ranks."""

    def train(comm: rp.comm.Communicator, steps: int, begun: Any = None) -> tuple[Any, Any]:
        model = nn.Linear(40, 30, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = rp.DistributedOptimizer(inner, model.named_parameters(), policy=policy, comm=comm, op="sum")
        if begun:
            model.load_state_dict(begun[0])
            optimizer.load_state_dict(copy.deepcopy(begun[1]))
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight.sum() / comm.size).backward()  # the sum is one, on any number of ranks
            optimizer.step()
        optimizer.flush()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    begun = rp.simulate(2, lambda comm: train(comm, 3))[0]
    expected = rp.simulate(2, lambda comm: train(comm, 3, begun))[0][0]["weight"]
    for model, _ in rp.simulate(size, lambda comm: train(comm, 3, begun)):
        torch.testing.assert_close(model["weight"], expected, rtol=8 * EPS, atol=0.0)


# -- 7. one rank's bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_raises_on_all_ranks_and_leaves_no_trace(
    size: int, overlap: bool, layer: int, value: float
) -> None:
    def rank(comm: rp.comm.Communicator) -> str:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05), nesterov, overlap=overlap, bucket_bytes=1)
        run(model, optimizer, comm.rank, 3)
        before, state = weights(model), optimizer.state_dict()
        optimizer.zero_grad()
        loss = loss_of(model, next(iter(batches(comm.rank, 1, 3))))
        if comm.rank == size - 1:
            model[layer].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
        loss.backward()
        with pytest.raises(rp.NonFiniteGradientError) as caught:
            optimizer.step()
        assert same_bytes(weights(model), before)
        after = optimizer.state_dict()
        assert after["ringprune"]["step"] == 3
        for name, entry in state["ringprune"]["parameters"].items():
            for kind, tensor in entry.items():
                assert same_bytes(tensor, after["ringprune"]["parameters"][name][kind]), (name, kind)
        return str(caught.value)

    for message in rp.simulate(size, rank):
        assert f"rank {size - 1}" in message and f"{layer}.weight" in message


@pytest.mark.parametrize("made", [0, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_skipped_step_is_as_if_it_had_not_been(policy: str, made: int) -> None:
    """Weights, and all that a checkpoint holds, right after it and some steps later."""

    def rank(comm: rp.comm.Communicator, bad_step: bool) -> tuple[list[Any], dict[str, Any]]:
        model = make_model()
        optimizer = wrap(model, comm, POLICIES[policy], nesterov, nonfinite="skip")
        run(model, optimizer, comm.rank, made)
        if bad_step:
            optimizer.zero_grad()
            factor = math.nan if comm.rank == 1 else 1.0
            (factor * loss_of(model, next(iter(batches(comm.rank, 1, 70))))).backward()
            optimizer.step()
        seen = [weights(model), copy.deepcopy(optimizer.state_dict())]
        run(model, optimizer, comm.rank, 5, start=50)
        return [*seen, weights(model), optimizer.state_dict()], optimizer.stats()

    expected, got = (rp.simulate(3, lambda comm, bad=bad: rank(comm, bad)) for bad in (False, True))
    for (wanted, stats), (found, stats_skipped) in zip(expected, got, strict=True):
        assert_same_state(found, wanted)
        assert stats_skipped["skipped_steps"] == 1 and stats_skipped["steps"] == stats["steps"] == made + 5


def assert_same_state(found: Any, wanted: Any) -> None:
    """The same bytes in every tensor, and all else equal."""
    if isinstance(wanted, Tensor):
        assert same_bytes(found, wanted)
    elif isinstance(wanted, dict):
        assert_same_state(list(found), list(wanted))
        assert_same_state(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_same_state(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": rp.IWP(0.02)}, "density.target=0.02"),
        ({"seed": 1}, "seed=1"),
        ({"backward_passes_per_step": 2}, "passes=2"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
        ({"bucket_bytes": 1}, "bucket"),
        ({"make": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}, "'lr': 0.1"),
        ({"make": torch.optim.AdamW}, "AdamW"),
        ({"model": nn.Linear(64, 50)}, "parameters"),
    ],
)
def test_ranks_that_built_different_things_all_hear_of_it(change: dict[str, Any], said: str) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        options: dict[str, Any] = {"policy": rp.IWP(0.05), "make": sgd}
        model = make_model()
        if comm.rank == 2:
            other = dict(change)
            model = other.pop("model", model)
            options |= other
        with pytest.raises(rp.RankMismatchError, match="rank 2") as caught:
            wrap(model, comm, options.pop("policy"), options.pop("make"), **options)
        assert said in str(caught.value)

    rp.simulate(3, rank)


def test_a_rank_that_cannot_build_its_optimizer_tells_the_others() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        expected: type[Exception] = rp.ConfigurationError if comm.rank == 1 else rp.RankMismatchError
        with pytest.raises(expected, match="nonfinite='maybe'"):
            wrap(make_model(), comm, rp.IWP(0.05), nonfinite="maybe" if comm.rank == 1 else None)

    rp.simulate(3, rank)


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05)])
def test_ranks_that_start_from_different_weights_all_hear_of_it(policy: rp.Policy) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        with torch.no_grad():
            model[2].weight[0, 0] += comm.rank == 1
        optimizer = wrap(model, comm, policy)
        with pytest.raises(rp.RankMismatchError, match=r"'2.weight' has other weights on rank 1"):
            run(model, optimizer, comm.rank, 1)

    rp.simulate(3, rank)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(0.05)])
def test_ranks_that_start_with_other_momentum_all_hear_of_it(policy: rp.Policy, make: Any) -> None:
    """As where one rank alone has loaded it: each stepped away from the others, and nobody knew."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = make(model.parameters())
        if comm.rank == 1:
            other = make_model()
            trained = make(other.parameters())
            run(other, trained, comm.rank, 2)
            optimizer.load_state_dict(trained.state_dict())
        wrapped = rp.DistributedOptimizer(optimizer, model.named_parameters(), policy=policy, comm=comm)
        with pytest.raises(rp.RankMismatchError, match="other momentum or moments on rank 1"):
            run(model, wrapped, comm.rank, 1)
        wrapped.zero_grad()
        optimizer.state.clear()
        run(model, wrapped, comm.rank, 2)
        return weights(model)

    first, *others = rp.simulate(3, rank)
    assert all(same_bytes(other, first) for other in others)


def test_a_policy_is_a_value() -> None:
    assert dataclasses.replace(rp.IWP(0.01), explore=0.25) == rp.IWP(0.01, explore=0.25)
    assert hash(rp.IWP(0.01)) == hash(rp.IWP(0.01))


def test_whatever_goes_wrong_at_construction_is_told_to_the_others() -> None:
    """Even what is no error of ours, such as an iterator of names that raises."""

    def names() -> Any:
        raise OSError("no such table")
        yield

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        if comm.rank == 1:
            with pytest.raises(OSError, match="no such table"):
                rp.DistributedOptimizer(sgd(model.parameters()), names(), comm=comm)
        else:
            with pytest.raises(rp.RankMismatchError, match=r"rank 1 could not build .* OSError: no such table"):
                rp.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), comm=comm)

    rp.simulate(3, rank)


def test_step_before_backward_with_zero_gradients_waits_for_the_others() -> None:
    """A rank without a batch was taken for Horovod's broadcast of optimizer state, and left the others waiting."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.IWP(0.05), lambda p: torch.optim.SGD(p, lr=0.1))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        if comm.rank == 0:
            loss_of(model, next(iter(batches(0, 1)))).backward()
        optimizer.step()
        return weights(model)

    results = rp.simulate(2, rank)
    assert same_bytes(*results)
    assert not same_bytes(results[0], weights(make_model()))
