"""A hierarchy: the laws of an exchange between nodes, on simulated ranks; tests/mpi holds them on real ones."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune import wire
from ringprune.comm.simulated import SimulatedCommunicator
from ringprune.exchange.kept import RoundedLane
from ringprune.exchange.packed import PackedLane
from tests.test_laws import POLICIES, reference
from tests.training import (
    OPTIMIZERS,
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

EPS = torch.finfo(torch.float32).eps
LAYOUTS = [(4, 2), (3, 2), (5, 3), (3, 1), (3, 3), (1, 1)]  # ranks, ranks on a node; some nodes have fewer
BETWEEN = [(4, 2), (3, 2), (5, 3)]

layouts = pytest.mark.parametrize(("size", "per_node"), LAYOUTS)
several = pytest.mark.parametrize(("size", "per_node"), BETWEEN)


def on_nodes(size: int, per_node: int, fn: Callable[[rp.comm.Communicator], Any]) -> list[Any]:
    return rp.simulate(size, fn, ranks_per_node=per_node)


def wrapped(comm: rp.comm.Communicator, policy: Any, make: Any = nesterov, **options: Any) -> Any:
    model = make_model()
    return model, wrap(model, comm, policy, make, hierarchical=True, **options)


# -- what is exchanged ------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("policy", ["one root", "16 bits", "own sets", "dense"])
def test_what_is_sent_and_what_nodes_keep_is_what_came_in(size: int, per_node: int, policy: str) -> None:
    """With a plain SGD of rate 1 weights move by the mean that was sent; the mean of what nodes keep is the rest."""
    steps, name = 8, "0.weight"

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        model, optimizer = wrapped(comm, POLICIES[policy], lambda p: torch.optim.SGD(p, lr=1.0))
        layer = model.get_parameter(name)
        gradients, sent = torch.zeros_like(layer, dtype=torch.float64), torch.zeros_like(layer, dtype=torch.float64)
        bulk = torch.zeros_like(gradients)
        for batch in batches(comm.rank, steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            gradients += torch.autograd.grad(loss, layer, retain_graph=True)[0].double()
            bulk += gradients.abs()
            loss.backward()
            optimizer.step()
            sent += layer.grad.double()
        kept = optimizer.state_dict()["ringprune"]["parameters"].get(name, {}).get("residual")
        return gradients, bulk, sent, None if kept is None else kept.double()

    results = on_nodes(size, per_node, rank)
    nodes = -(-size // per_node)
    keepers = [number for number, result in enumerate(results) if result[3] is not None]
    assert keepers == ([] if policy == "dense" else list(range(0, size, per_node))), "only the first rank of a node"
    came_in = sum(r[0] for r in results) / size
    kept = sum(r[3] for r in results if r[3] is not None) / nodes if keepers else torch.zeros_like(came_in)
    # Sums inside the node, their factor, the residual, the sum over nodes and its factor each round by EPS/2 of theirs.
    bulk = sum(r[1] for r in results) / size
    bound = EPS * (size + 6) * (bulk + results[0][2].abs())
    assert ((came_in - results[0][2] - kept).abs() <= bound).all()
    assert bool(results[0][2].abs().max() > 0) and bool(kept.abs().max() > 0) == bool(keepers)


@layouts
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_the_same_bytes_on_every_rank_after_every_step(size: int, per_node: int, policy: str) -> None:
    def rank(comm: rp.comm.Communicator) -> list[Tensor]:
        model, optimizer = wrapped(comm, POLICIES[policy], bucket_bytes=20_000)
        history = []
        for batch in batches(comm.rank, 8):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            history.append(weights(model))
        return history

    histories = on_nodes(size, per_node, rank)
    for history in histories[1:]:
        assert all(same_bytes(a, b) for a, b in zip(history, histories[0], strict=True))
    assert not same_bytes(histories[0][0], histories[0][-1])


@several
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_one_is_plain_training_up_to_the_order_of_sums(
    size: int, per_node: int, policy: rp.Policy, name: str
) -> None:
    """The mean over all ranks, though nodes have different numbers of them; the bound is that of tests/test_laws.py.

    A hierarchy rounds once more per step: what a node exchanges is its sum times nodes / ranks.
    """
    steps, make = 50, OPTIMIZERS[name]
    expected = rp.simulate(size, lambda comm: reference(comm, make, steps))
    got = on_nodes(size, per_node, lambda comm: train(comm, policy, make, steps, hierarchical=True)[0])
    group = make([torch.zeros(1)]).param_groups[0]
    gain = 2 / group["eps"] if name == "adamw" else 1 / (1 - group["momentum"])
    bound = 2 * steps * group["lr"] * gain * (size + 5) * EPS * expected[0][1]
    assert (got[0] - expected[0][0]).abs().max() <= bound + 4 * EPS * expected[0][0].abs().max()


@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank_on_each_node_is_no_hierarchy_to_the_bit(policy: str) -> None:
    """A sum of one, times 1: nothing is rounded that is not rounded without."""
    flat = rp.simulate(3, lambda comm: train(comm, POLICIES[policy], nesterov, 12)[0])
    got = on_nodes(3, 1, lambda comm: train(comm, POLICIES[policy], nesterov, 12, hierarchical=True)[0])
    assert same_bytes(got[0], flat[0])


def test_dense_on_one_node_is_plain_training_to_the_bit() -> None:
    """The sum over the ranks, times 1 / ranks, and nobody to exchange it with."""
    flat = rp.simulate(3, lambda comm: train(comm, rp.Dense(), nesterov, 12)[0])
    got = on_nodes(3, 3, lambda comm: train(comm, rp.Dense(), nesterov, 12, hierarchical=True)[0])
    assert same_bytes(got[0], flat[0])


@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0, correction="global")], ids=lambda policy: policy.name)
@pytest.mark.parametrize("options", [{"op": "sum"}, {"gradient_predivide_factor": 2.0}], ids=["sum", "predivided"])
def test_horovods_arguments_mean_the_same(policy: rp.Policy, options: dict[str, Any]) -> None:
    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    flat = rp.simulate(3, lambda comm: train(comm, policy, plain, 5, **options)[0])
    got = on_nodes(3, 2, lambda comm: train(comm, policy, plain, 5, hierarchical=True, **options)[0])
    # 5 steps of rate 0.01, gradients and their sum below 4, each rounded at most 10 times.
    assert (got[0] - flat[0]).abs().max() <= 5 * 0.01 * 4 * 10 * EPS + 4 * EPS * flat[0].abs().max()


@pytest.mark.parametrize("options", [{"overlap": False}, {"backward_passes_per_step": 2}, {"bucket_bytes": 4}], ids=str)
def test_when_it_is_exchanged_changes_nothing(options: dict[str, Any]) -> None:
    def rank(comm: rp.comm.Communicator, **options: Any) -> Tensor:
        model, optimizer = wrapped(comm, rp.IWP(0.05, clip_norm_per_tensor=0.5), sgd, **options)
        passes = options.get("backward_passes_per_step", 1)
        for batch in batches(comm.rank, 6):
            optimizer.zero_grad()
            for _ in range(passes):
                (loss_of(model, batch) / passes).backward()
            optimizer.step()
        return weights(model)

    got = on_nodes(4, 2, lambda comm: rank(comm, **options))
    expected = on_nodes(4, 2, rank)
    if "bucket_bytes" in options:  # other buckets have other roots
        assert all(same_bytes(other, got[0]) for other in got)
    else:
        assert same_bytes(got[0], expected[0])


def test_gradients_that_are_missing_on_some_ranks_count_as_zeros() -> None:
    """Hooks fire in another order, or not at all: the messages are made in one order all the same."""

    def rank(comm: rp.comm.Communicator, **options: Any) -> Tensor:
        model = make_model()
        optimizer = wrap(model, comm, rp.Dense(), sgd, bucket_bytes=4, **options)
        for step in range(3):
            optimizer.zero_grad()
            if (comm.rank + step) % 2:
                loss_of(model, next(batches(comm.rank, 1, step))).backward()
            elif comm.rank:
                model[2].weight.sum().backward()
                model[4].bias.sum().backward()
            optimizer.step()
        return weights(model)

    flat = rp.simulate(3, rank)
    got = on_nodes(3, 2, lambda comm: rank(comm, hierarchical=True))
    assert all(same_bytes(other, got[0]) for other in got)
    assert torch.allclose(got[0], flat[0], atol=1e-6)


# -- steps that are not made ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["one root", "own sets", "8 bits", "dense"])
@pytest.mark.parametrize("bad", [1, 2])
def test_nan_on_a_rank_that_is_not_first_stops_all_and_leaves_no_trace(policy: str, overlap: bool, bad: int) -> None:
    def rank(comm: rp.comm.Communicator, broken: bool) -> Tensor:
        model, optimizer = wrapped(comm, POLICIES[policy], overlap=overlap)
        run(model, optimizer, comm.rank, 3)
        if broken:
            before = weights(model)
            optimizer.zero_grad()
            loss = loss_of(model, next(batches(comm.rank, 1, 99)))
            (loss * (math.nan if comm.rank == bad else 1.0)).backward()
            with pytest.raises(rp.NonFiniteGradientError, match=rf"^rank {bad}: the gradient of '\d.\w+' has"):
                optimizer.step()
            assert same_bytes(weights(model), before)
            optimizer.zero_grad()
        run(model, optimizer, comm.rank, 3, start=3)
        return weights(model)

    with_trouble = on_nodes(4, 2, lambda comm: rank(comm, True))
    without = on_nodes(4, 2, lambda comm: rank(comm, False))
    assert all(same_bytes(got, without[0]) for got in with_trouble)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, int]:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = wrap(model, comm, rp.IWP(0.05), sgd, scaler=scaler, hierarchical=True)
        for step, batch in enumerate(batches(comm.rank, 4)):
            optimizer.zero_grad()
            loss = loss_of(model, batch) * (math.inf if step == 2 and comm.rank == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return weights(model), optimizer.stats()["skipped_steps"]

    results = on_nodes(4, 2, rank)
    assert all(same_bytes(got, results[0][0]) and skipped == 1 for got, skipped in results)


# -- what goes wrong between the nodes --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("policy", "reader"), [("one root", "IndexCode"), ("8 bits", "ValueCode")])
@several
def test_what_fails_between_nodes_is_told_inside_them(
    size: int, per_node: int, policy: str, reader: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the nodes' first ranks have the message: the others waited for the averages until the job ended."""
    decode, bad = getattr(wire, reader).decode, {"now": False}

    def damaged(code: Any, message: Tensor, *rest: Any, **named: Any) -> Any:
        if bad["now"]:
            raise rp.CommunicatorError(f"{named['name']}: it is damaged")
        return decode(code, message, *rest, **named)

    monkeypatch.setattr(getattr(wire, reader), "decode", damaged)

    def rank(comm: rp.comm.Communicator) -> tuple[str, bool]:
        model, optimizer = wrapped(comm, POLICIES[policy], overlap=overlap, bucket_bytes=13_000)
        run(model, optimizer, comm.rank, 2)
        before = weights(model)
        comm.barrier(name="two steps are made")
        bad["now"] = True
        optimizer.zero_grad()
        loss_of(model, next(batches(comm.rank, 1, 2))).backward()
        with pytest.raises(rp.CommunicatorError) as raised:
            optimizer.step()
        assert same_bytes(weights(model), before)
        with pytest.raises((rp.CommunicatorError, rp.UsageError)):  # it goes on from a checkpoint, with a new wrapper
            optimizer.step()
        assert same_bytes(weights(model), before)
        assert comm.allreduce(torch.ones(1), name="afterwards").wait().item() == size
        return str(raised.value), comm.rank % per_node == 0

    for message, first in rp.simulate(size, rank, ranks_per_node=per_node, timeout=30):
        assert ("it is damaged" in message) == first
        assert first or "the first rank of this node could not exchange it" in message


@pytest.mark.parametrize("skip", [True, False])
def test_what_fails_between_nodes_in_a_step_that_is_not_made_is_told_too(
    skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes' other ranks trained on, or waited for who had the NaN."""

    def damaged(code: Any, message: Tensor, *, name: str) -> Any:
        raise rp.CommunicatorError(f"{name}: it is damaged")

    monkeypatch.setattr(wire.IndexCode, "decode", damaged)

    def rank(comm: rp.comm.Communicator) -> str:
        model, optimizer = wrapped(comm, POLICIES["one root"], nonfinite="skip" if skip else "raise")
        optimizer.zero_grad()
        (loss_of(model, next(batches(comm.rank, 1))) * (math.nan if comm.rank == 3 else 1.0)).backward()
        with pytest.raises(rp.CommunicatorError) as raised:
            optimizer.step()
        return str(raised.value)

    found = rp.simulate(4, rank, ranks_per_node=2, timeout=30)
    assert ["damaged" in message for message in found] == [True, False, True, False]


def test_what_one_first_rank_alone_has_met_it_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes wait for it: it has to end, and not to wait for them in turn."""

    def lost(code: Any, message: Tensor, *, name: str) -> Any:
        raise rp.CommunicatorError("the cable is out", alone=True)

    monkeypatch.setattr(wire.IndexCode, "decode", lost)

    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm, POLICIES["one root"])
        run(model, optimizer, comm.rank, 1)

    with pytest.raises(rp.CommunicatorError, match="the cable is out"):
        rp.simulate(4, rank, ranks_per_node=2, timeout=30)


@pytest.mark.parametrize(("lane", "policy"), [(PackedLane, "one root"), (RoundedLane, "16 bits")])
def test_a_flush_that_fails_between_nodes_is_told_inside_them(
    lane: type[Any], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(lane: Any, outputs: Any) -> None:
        raise rp.CommunicatorError("the network is down")

    monkeypatch.setattr(lane, "flush", fails)

    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm, POLICIES[policy])
        run(model, optimizer, comm.rank, 2)
        with pytest.raises(rp.CommunicatorError, match="down" if comm.rank % 2 == 0 else "first rank of this node"):
            optimizer.flush()

    rp.simulate(4, rank, ranks_per_node=2, timeout=30)


# -- ranks that differ ------------------------------------------------------------------------------------------------


def errors_of_all(size: int, per_node: int, make: Callable[[rp.comm.Communicator], Any]) -> list[str]:
    def rank(comm: rp.comm.Communicator) -> str:
        with pytest.raises(rp.RingPruneError) as raised:
            make(comm)
        return str(raised.value)

    return on_nodes(size, per_node, rank)


def test_a_hierarchy_on_some_ranks_only_is_told_on_all() -> None:
    errors = errors_of_all(3, 2, lambda comm: wrap(make_model(), comm, rp.IWP(0.05), hierarchical=comm.rank != 1))
    assert all("'hierarchical=True' on rank 0, 'hierarchical=False' on rank 1" in error for error in errors)


def test_a_rank_that_cannot_be_built_is_told_on_all() -> None:
    errors = errors_of_all(
        4, 2, lambda comm: wrap(make_model(), comm, rp.IWP(0.05), hierarchical=True, seed=-(comm.rank == 3))
    )
    assert all("seed=-1" in error for error in errors)


def test_closing_lets_go_of_what_a_communicator_of_the_users_own_was_divided_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stayed until the end of the process, more with each wrapper."""
    left = []
    monkeypatch.setattr(SimulatedCommunicator, "leave", lambda self: left.append(self.size))

    def rank(comm: rp.comm.Communicator) -> None:
        wrap(make_model(), comm, rp.Dense(), hierarchical=True).close()

    rp.simulate(4, rank, ranks_per_node=2)
    assert sorted(left) == [2] * 6, "the nodes' own, and those of their first ranks"


def test_more_roots_than_nodes_are_refused() -> None:
    errors = errors_of_all(4, 2, lambda comm: wrap(make_model(), comm, rp.IWP(0.05, roots=3), hierarchical=True))
    assert all("roots=3 with hierarchical=True on 2 nodes" in error for error in errors)


def test_other_weights_on_a_rank_that_is_not_first_are_found() -> None:
    def make(comm: rp.comm.Communicator) -> None:
        model = make_model(seed=int(comm.rank == 3))
        run(model, wrap(model, comm, rp.IWP(0.05), hierarchical=True), comm.rank, 1)

    assert all("'0.weight' has other weights on rank 3" in error for error in errors_of_all(4, 2, make))


def test_it_is_a_flag_and_needs_a_communicator_that_divides() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(rp.RingPruneError, match="hierarchical"):
            wrap(make_model(), comm, rp.IWP(0.05), hierarchical="yes")
        comm.abilities = comm.abilities - {"divide"}
        with pytest.raises(rp.ConfigurationError, match="simulated communicator cannot divide its ranks by node"):
            wrap(make_model(), comm, rp.IWP(0.05), hierarchical=True)

    on_nodes(1, 1, rank)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 3), (3, 2), (3, 3)])
def test_bytes_between_nodes_are_those_of_so_many_ranks(size: int, per_node: int) -> None:
    steps, nodes, numel = 4, -(-size // per_node), 4096 + 3072 + 602
    counted = ("bytes_values", "bytes_indices", "bytes_dense", "dense_equivalent_bytes")

    def rank(comm: rp.comm.Communicator, **options: Any) -> dict[str, Any]:
        return train(comm, rp.IWP(0.05), sgd, steps, **options)[1].stats()

    flat = rp.simulate(nodes, rank)[0]
    for number, stats in enumerate(on_nodes(size, per_node, lambda comm: rank(comm, hierarchical=True))):
        first = number % per_node == 0
        assert [stats[key] for key in counted] == [flat[key] if first else 0.0 for key in counted]
        # All ranks: a barrier, 8 bytes for the step, each of 6 weights, and momentum at the start, the verdicts.
        headers = (size - 1) * (4 + 8 * 8) + steps * 2 * (size - 1) / size * 12
        assert stats["bytes_headers"] == pytest.approx(headers)
        here = min(per_node, size - number // per_node * per_node)
        assert stats["bytes_inside_node"] == pytest.approx(steps * 3 * (here - 1) / here * 4 * numel), "sum, broadcast"
        assert (stats["wire_ratio"] > 1) == first


def test_without_a_hierarchy_nothing_is_sent_inside_nodes() -> None:
    stats = on_nodes(2, 2, lambda comm: train(comm, rp.IWP(0.05), sgd, 2)[1].stats())
    assert [entry["bytes_inside_node"] for entry in stats] == [0.0, 0.0]


# -- between steps ----------------------------------------------------------------------------------------------------


@layouts
def test_flush_leaves_nothing_behind(size: int, per_node: int) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor | None, Tensor, dict[str, Any]]:
        model, optimizer = wrapped(comm, rp.IWP(0.05), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
        run(model, optimizer, comm.rank, 5)
        kept = optimizer.state_dict()["ringprune"]["parameters"].get("0.weight", {}).get("residual")
        before = model[0].weight.detach().double()
        optimizer.flush()
        moved = before - model[0].weight.detach().double()
        return None if kept is None else kept.double(), moved, optimizer.state_dict()["ringprune"]

    results = on_nodes(size, per_node, rank)
    kept = [residual for residual, _, _ in results if residual is not None]
    assert len(kept) == -(-size // per_node)
    for _, moved, state in results:
        assert torch.allclose(moved, sum(kept) / len(kept), atol=8 * EPS)
        assert not any(entry["residual"].any() for entry in state["parameters"].values() if "residual" in entry)
    first = results[0][2]["parameters"]
    for other in results[per_node::per_node]:
        for name, entry in other[2]["parameters"].items():
            assert all(same_bytes(tensor, first[name][kind]) for kind, tensor in entry.items())


def resumed(comm: rp.comm.Communicator, saved: dict[str, Any], policy: Any, **options: Any) -> Tensor:
    model = make_model(seed=3)
    optimizer = wrap(model, comm, policy, nesterov, **options)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    run(model, optimizer, comm.rank, 6, start=5)
    return weights(model)


def checkpoints(size: int, per_node: int, policy: Any, flush: bool = False, **options: Any) -> list[dict[str, Any]]:
    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, policy, nesterov, **options)
        run(model, optimizer, comm.rank, 5)
        if flush:
            optimizer.flush()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return on_nodes(size, per_node, rank)


@layouts
@pytest.mark.parametrize("policy", ["explore", "own sets", "4 bits"])
def test_training_goes_on_from_a_checkpoint_to_the_bit(size: int, per_node: int, policy: str) -> None:
    chosen = POLICIES[policy]
    expected = on_nodes(size, per_node, lambda comm: train(comm, chosen, nesterov, 11, hierarchical=True)[0])
    saved = checkpoints(size, per_node, chosen, hierarchical=True)
    got = on_nodes(size, per_node, lambda comm: resumed(comm, saved[comm.rank], chosen, hierarchical=True))
    assert all(same_bytes(weight, expected[0]) for weight in got)


@pytest.mark.parametrize(("size", "per_node", "options"), [(3, 2, {"hierarchical": True}), (2, 2, {}), (1, 1, {})])
def test_a_flushed_checkpoint_of_a_first_rank_serves_all(size: int, per_node: int, options: dict[str, Any]) -> None:
    saved = checkpoints(4, 2, rp.IWP(0.05), flush=True, hierarchical=True)[2]
    got = on_nodes(size, per_node, lambda comm: resumed(comm, saved, rp.IWP(0.05), **options))
    assert all(same_bytes(weight, got[0]) for weight in got)


def test_a_flushed_checkpoint_without_a_hierarchy_serves_one_with() -> None:
    saved = checkpoints(2, 1, rp.IWP(0.05), flush=True)[1]
    got = on_nodes(4, 2, lambda comm: resumed(comm, saved, rp.IWP(0.05), hierarchical=True))
    assert all(same_bytes(weight, got[0]) for weight in got)


def test_where_nothing_is_kept_back_any_rank_s_checkpoint_serves_all() -> None:
    """It was said to hold the residuals of its rank, of which there are none."""
    for rank in (0, 1):
        saved = checkpoints(4, 2, rp.Dense(), hierarchical=True)[rank]
        for size, per_node, options in ((4, 2, {"hierarchical": True}), (3, 2, {"hierarchical": True}), (2, 2, {})):

            def go_on(comm: rp.comm.Communicator, saved: Any = saved, options: Any = options) -> Tensor:
                return resumed(comm, copy.deepcopy(saved), rp.Dense(), **options)  # SGD steps on what it has loaded

            got = on_nodes(size, per_node, go_on)
            assert all(same_bytes(weight, got[0]) for weight in got)


@pytest.mark.parametrize("rank_saved", [1, 3])
def test_a_flushed_checkpoint_that_first_ranks_cannot_use_is_refused_on_all_ranks(rank_saved: int) -> None:
    """Of a rank that keeps nothing back: such ranks took it, changed what they had by it, and went on alone."""
    saved = checkpoints(4, 2, rp.IWP(0.05), flush=True, hierarchical=True)[rank_saved]["optimizer"]

    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer = wrapped(comm, rp.IWP(0.05))
        run(model, optimizer, comm.rank, 2)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(rp.CheckpointError, match=r"one of a node's first rank.*Missing: 0\.weight\.residual"):
            optimizer.load_state_dict(copy.deepcopy(saved))
        assert same_state(optimizer.state_dict(), before), "nothing was changed"
        run(model, optimizer, comm.rank, 2)  # and all are where they were

    on_nodes(4, 2, rank)


def test_what_one_rank_cannot_load_no_rank_of_a_hierarchy_loads() -> None:
    saved = checkpoints(3, 2, rp.IWP(0.05), hierarchical=True)

    def rank(comm: rp.comm.Communicator) -> str:
        _, optimizer = wrapped(comm, rp.IWP(0.05))
        mine = copy.deepcopy(saved[comm.rank]["optimizer"])
        if comm.rank == 1:
            del mine["ringprune"]
        with pytest.raises(rp.CheckpointError, match="no 'ringprune' entry") as refused:
            optimizer.load_state_dict(mine)
        return str(refused.value)

    said = on_nodes(3, 2, rank)
    assert [text.startswith("nothing was loaded, since not all ranks can: rank 1: ") for text in said] == [
        True,
        False,
        True,
    ]


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return same_bytes(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return bool(a == b)


def test_checkpoints_of_other_nodes_are_refused_on_all_ranks() -> None:
    saved = checkpoints(4, 2, rp.IWP(0.05), hierarchical=True)
    for per_node, options in ((1, {"hierarchical": True}), (4, {"hierarchical": True}), (2, {})):

        def rank(comm: rp.comm.Communicator, options: dict[str, Any] = options) -> None:
            with pytest.raises(rp.CheckpointError, match="in which 2 of 4 ranks keep residuals, here"):
                resumed(comm, saved[comm.rank], rp.IWP(0.05), **options)

        on_nodes(4, per_node, rank)
