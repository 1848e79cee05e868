r"""Training on a GPU: the same bits as on the CPU, on every rank; with pytest alone, on simulated ranks.

    python -m pytest -q -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -W ignore \
        -k "[cuda" tests/test_cuda_training.py tests/test_cuda_streams.py tests/test_residual.py

With the id "cpu" a test compares the CPU with itself, which shows that the test works.
"""

import functools
import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from tests.gpu_model import (
    LIMIT,
    advance,
    differing,
    halving,
    kept,
    loss_of,
    pulls,
    weights,
    wrapped,
)
from tests.test_laws import POLICIES

STEPS = 6


LOCAL = rp.LocalSteps(2, momentum="shared")
JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (policy, {}) for name, policy in POLICIES.items()},
    **{f"{name}, afterwards": (POLICIES[name], {"overlap": False}) for name in ("one root", "dense", "own sets")},
    "by name": ("iwp", {}),
    "P3": (rp.P3(slice_bytes=4_096), {}),
    "P3 packed": (replace(POLICIES["one root"], schedule=rp.LayerPriority(4_096)), {}),
    "P3 in 8 bits": (rp.P3(values="int8"), {}),
    "local steps": (rp.IWP(0.05, local_steps=2), {}),
    "local steps, shared momentum": (rp.IWP(0.05, local_steps=LOCAL), {}),
    "local steps, dense": (rp.Dense(local_steps=rp.LocalSteps(3, outer_momentum=0.5)), {}),
    "nodes": (POLICIES["one root"], {"hierarchical": True}),
    "nodes, own sets": (POLICIES["own sets"], {"hierarchical": True}),
    "nodes, dense": (POLICIES["dense"], {"hierarchical": True}),
    "sums": (POLICIES["all roots"], {"op": "sum"}),
    "bit maps": (rp.IWP(0.3), {}),
    "bit maps of all": (rp.IWP(0.3, roots="all", index_format="bitmap"), {}),
    "guard": (POLICIES["one root"], {"guard": rp.Guard(every=2, bound=1e-6, growths=1)}),
    "drift": (POLICIES["one root"], {"check_every": 2}),
    "Nesterov": (POLICIES["one root"], {"make": functools.partial(halving, nesterov=True)}),
    "Adam": (POLICIES["dense"], {"make": functools.partial(torch.optim.Adam, lr=0.125)}),
}
BETWEEN_DEVICES = {"Adam": 1e-5}
"""Square roots and quotients of torch's own kernels: bits may differ, so weights of about 1 are compared so far."""


@functools.cache
def trained(job: str, device: str, dtype: torch.dtype = torch.float32) -> list[tuple[Any, Any, Any]]:
    """Of each rank: weights as bits and as numbers, and the bits of what it keeps."""
    policy, options = JOBS[job]

    def rank(comm: rp.comm.Communicator) -> tuple[Any, Any, Any]:
        model = pulls(comm.rank, device, dtype)
        optimizer = wrapped(model, comm, policy, bucket_bytes=20_000, **options)
        advance(model, optimizer, STEPS)
        state = kept(optimizer)  # settles what P3 has under way
        numbers = torch.cat([p.detach().float().cpu().reshape(-1) for p in model.parameters()])
        return weights(model), numbers, state

    nodes = "hierarchical" in options
    return rp.simulate(4 if nodes else 2, rank, timeout=LIMIT, ranks_per_node=2 if nodes else None)


@pytest.mark.parametrize("job", JOBS)
def test_it_trains_as_on_the_cpu(job: str, device: str) -> None:
    found, expected = trained(job, device), trained(job, "cpu")
    for mine, other in zip(found, expected, strict=True):
        if job != "by name":  # which is in the middle of local steps
            assert not differing(mine[0], found[0][0])
        if job in BETWEEN_DEVICES:
            torch.testing.assert_close(mine[1], other[1], rtol=0, atol=BETWEEN_DEVICES[job])
        else:
            assert not differing(mine[0], other[0])
            assert not differing(mine[2], other[2])
    start = torch.cat([p.detach().reshape(-1) for p in pulls(0, "cpu").parameters()])
    assert not torch.equal(found[0][1], start) and found[0][1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("job", ["one root", "dense", "own sets", "8 bits", "look-ahead", "local steps", "balanced"])
def test_weights_of_16_bits(job: str, dtype: torch.dtype, device: str) -> None:
    found, expected = trained(job, device, dtype), trained(job, "cpu", dtype)
    for mine, other in zip(found, expected, strict=True):
        assert not differing(mine[0], other[0]) and not differing(mine[2], other[2])


@pytest.mark.parametrize(
    "job", ["one root", "own sets", "balanced", "core and explored", "8 bits", "relevance, estimate, turns"]
)
def test_what_is_sent_and_what_is_kept_is_what_came_in(job: str, device: str) -> None:
    """With a rate of 1 and no momentum weights move by what was sent; residuals hold the rest of every gradient."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, Tensor]:
        model = pulls(comm.rank, device)
        layer, target = model.get_parameter("0.weight"), model.get_buffer("0.target")
        optimizer = wrapped(model, comm, POLICIES[job], lambda p: torch.optim.SGD(p, lr=0.5))
        came, sent = torch.zeros_like(layer, dtype=torch.float64), torch.zeros_like(layer, dtype=torch.float64)
        for _ in range(STEPS):
            optimizer.zero_grad()
            came += ((layer - target) * 0.5).detach().double()
            loss_of(model).backward()
            optimizer.step()
            assert layer.grad is not None
            sent += comm.size * layer.grad.double()
        residual = optimizer.state_dict()["ringprune"]["parameters"]["0.weight"]["residual"].double()
        return came.cpu(), sent.cpu(), residual.reshape(came.shape).cpu()

    ranks = rp.simulate(2, rank, timeout=LIMIT)
    came, residual = ranks[0][0] + ranks[1][0], ranks[0][2] + ranks[1][2]
    # Each of some ten roundings per step is half a unit in the last place of sums that stay below 64.
    assert (came - ranks[0][1] - residual).abs().max() <= 10 * STEPS * 64 * torch.finfo(torch.float32).eps / 2
    assert residual.abs().max() > 0


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["to", "from", "stays"])
@pytest.mark.parametrize(
    "job", ["one root", "own sets", "dense in 16 bits", "core and explored", "local steps", "guard"]
)
def test_a_checkpoint_goes_on_on_another_device(job: str, way: str, device: str) -> None:
    """Saved after 4 steps on one device, loaded on the other: the same bits as a run that did not stop."""
    first, second = {"to": ("cpu", device), "from": (device, "cpu"), "stays": (device, device)}[way]
    policy, options = JOBS[job]

    def rank(comm: rp.comm.Communicator) -> None:
        model = pulls(comm.rank, first)
        optimizer = wrapped(model, comm, policy, **options)
        advance(model, optimizer, 4)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        again = pulls(comm.rank, second)
        other = wrapped(again, comm, policy, **options)
        state = torch.load(file, map_location="cpu" if way == "from" else None, weights_only=False)
        again.load_state_dict(state["model"])
        other.load_state_dict(state["optimizer"])
        assert not differing(kept(optimizer), kept(other))
        advance(model, optimizer, 4)
        advance(again, other, 4)
        assert not differing(weights(model), weights(again))
        assert not differing(kept(optimizer), kept(other))

    rp.simulate(2, rank, timeout=LIMIT)


@pytest.mark.parametrize(
    "job", ["one root", "own sets", "balanced in 8 bits", "error feedback", "local steps", "nodes"]
)
def test_a_flush_leaves_nothing_behind(job: str, device: str) -> None:
    policy, options = JOBS[job]

    def rank(comm: rp.comm.Communicator, where: str) -> Any:
        model = pulls(comm.rank, where)
        optimizer = wrapped(model, comm, policy, **options)
        advance(model, optimizer, 5)
        optimizer.flush()
        state = optimizer.state_dict()["ringprune"]["parameters"]
        assert not any(state[name]["residual"].any() for name in ("0.weight", "1.weight") if name in state)
        return weights(model), kept(optimizer)

    found, expected = (
        rp.simulate(4, functools.partial(rank, where=to), timeout=LIMIT, ranks_per_node=2) for to in (device, "cpu")
    )
    for mine, other in zip(found, expected, strict=True):
        assert not differing(mine[0], found[0][0]) and not differing(mine[0], other[0])
        assert not differing(mine[1], other[1])


# -- loss scaling, clipping, what is not finite -----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["one root", "dense", "own sets"])
def test_an_overflow_skips_the_step_on_all_ranks(policy: str, overlap: bool, device: str) -> None:
    """A scale that is a power of two changes no bit, and a skipped step leaves none."""

    def rank(comm: rp.comm.Communicator, bad: set[int], scaled: bool) -> Any:
        model = pulls(comm.rank, device)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1000, enabled=scaled)
        optimizer = wrapped(model, comm, POLICIES[policy], overlap=overlap, scaler=scaler if scaled else None)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model) * (math.inf if step in bad and comm.rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model), kept(optimizer), scaler.get_scale(), optimizer.stats()

    def run(bad: set[int], scaled: bool, steps: int) -> Any:
        results = rp.simulate(2, lambda comm: rank(comm, bad, scaled), timeout=LIMIT)
        assert not differing(results[0][0], results[1][0])
        assert all(result[3]["skipped_steps"] == 5 - steps and result[3]["steps"] == steps for result in results)
        return results

    scaled, plain, skipped = run(set(), True, 5), run(set(), False, 5), run({2}, True, 4)
    assert [result[2] for result in skipped] == [512.0] * 2
    for mine, other in zip(scaled, plain, strict=True):
        assert not differing(mine[0], other[0]) and not differing(mine[1], other[1])
    assert differing(skipped[0][0], scaled[0][0])


@pytest.mark.parametrize("policy", ["one root", "dense", "own sets", "balanced"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_gradient_raises_on_all_ranks_and_leaves_no_trace(policy: str, overlap: bool, device: str) -> None:
    def rank(comm: rp.comm.Communicator) -> str:
        model = pulls(comm.rank, device)
        optimizer = wrapped(model, comm, POLICIES[policy], overlap=overlap)
        advance(model, optimizer, 2)
        before = weights(model), kept(optimizer)
        optimizer.zero_grad()
        (loss_of(model) * (math.nan if comm.rank == 1 else 1.0)).backward()
        with pytest.raises(rp.NonFiniteGradientError) as caught:
            optimizer.step()
        assert not differing(weights(model), before[0]) and not differing(kept(optimizer), before[1])
        advance(model, optimizer, 1)
        return str(caught.value)

    assert all("rank 1" in message for message in rp.simulate(2, rank, timeout=LIMIT))


def test_averages_can_be_clipped(device: str) -> None:
    """The norm is a sum, whose order is the device's: weights are compared as far as that goes."""

    def rank(comm: rp.comm.Communicator, where: str) -> Tensor:
        model = pulls(comm.rank, where)
        optimizer = wrapped(model, comm, POLICIES["dense"])
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])

    found, expected = (rp.simulate(2, functools.partial(rank, where=to), timeout=LIMIT) for to in (device, "cpu"))
    assert torch.equal(*found)
    # Norms of 7,238 squares: less than 7,238 roundings each, of gradients that clipping leaves below 1.
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=7_238 * STEPS * torch.finfo(torch.float32).eps / 2)


# -- tables, choosing, counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    "policy", [rp.Parallax(way) for way in ("auto", "dense", "gather", "owners")] + [rp.Dense()], ids=str
)
def test_tables_of_rows(policy: Any, sharded: bool, device: str) -> None:
    """Gradients of rows are whole numbers, so that those of a row which was looked up twice add up exactly."""
    rows, dim = 200, 8

    def rank(comm: rp.comm.Communicator, where: str) -> tuple[Tensor, Any]:
        table: Any = nn.Embedding(rows, dim, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.arange(rows * dim).view(rows, dim) / 128)
        table = table.to(where)
        if sharded:
            table = rp.ShardedEmbedding.from_pretrained(table.weight.detach(), freeze=False, comm=comm)
        inner = torch.optim.SGD(table.parameters(), lr=0.125)
        optimizer = rp.DistributedOptimizer(inner, table.named_parameters(), policy=policy, comm=comm, model=table)
        factors = torch.arange(dim, device=where) - 3.0
        for step in range(STEPS):
            optimizer.zero_grad()
            looked_up = torch.arange(step, step + 40, 1 + comm.rank, device=where) % 23
            (table(looked_up) * factors).sum().backward()
            optimizer.step()
        return table.state_dict()["weight"].detach().cpu().clone(), optimizer.stats()

    found, expected = (rp.simulate(2, functools.partial(rank, where=to), timeout=LIMIT) for to in (device, "cpu"))
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[0], found[0][0])
        assert mine[1]["bytes_sent"] == pytest.approx(other[1]["bytes_sent"])


def test_auto_measures_and_chooses(device: str) -> None:
    def rank(comm: rp.comm.Communicator) -> Any:
        model = pulls(comm.rank, device)
        optimizer = wrapped(model, comm, "auto")
        advance(model, optimizer, 40)
        return weights(model), optimizer.stats()

    results = rp.simulate(2, rank, timeout=LIMIT)
    assert not differing(results[0][0], results[1][0])
    assert all(stats["steps"] == 40 for _, stats in results)


def test_stats_are_plausible(device: str) -> None:
    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = pulls(comm.rank, device)
        optimizer = wrapped(model, comm, rp.IWP(0.05))
        advance(model, optimizer, STEPS)
        stats: dict[str, Any] = optimizer.stats()
        return stats

    for stats in rp.simulate(2, rank, timeout=LIMIT):
        assert stats["steps"] == STEPS and stats["density"] == 0.05
        assert stats["realised_density"] == pytest.approx(0.05, rel=0.01)
        assert stats["bytes_sent"] > 0 and stats["wire_ratio"] > 5
        assert all(0 <= seconds < LIMIT for seconds in stats["seconds"].values())
        assert sum(stats["seconds"].values()) > 0
        assert sum(stats["selection"].values()) >= 0
