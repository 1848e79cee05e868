"""ScaleCom (arXiv 2104.11125): its recurrence, its order of roots, and the two properties its analysis rests on."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import ringprune as rp
from ringprune.agreement import Roots
from ringprune.selection import Density, Warmup
from tests.policies.one_layer import NUMEL, OneLayer, gradient_of, largest, sent_at
from tests.training import adamw, make_model, run, same_bytes, sgd, train, weights, wrap

DENSITY = 0.02
K = round(DENSITY * NUMEL)


def steps_of(comm: rp.comm.Communicator, policy: rp.Policy, steps: int, **options: Any) -> list[tuple[Tensor, ...]]:
    """For each step the residual before, the gradient, what was sent, and the residual after."""
    layer = OneLayer(comm, policy, **options)
    history, before = [], torch.zeros(NUMEL)
    for step in range(steps):
        gradient = gradient_of(comm.rank, step)
        sent = layer.step(gradient)
        history.append((before, gradient, sent, layer.kept()))
        before = layer.kept()
    return history


@pytest.mark.parametrize("low_pass", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_recurrence_of_the_paper(low_pass: float, size: int) -> None:
    """P = m + g; the root's top k of |p|; m <- (1 - b) m + b (p - p at I), to the bit as m + b (p - p at I - m)."""
    histories = rp.simulate(size, lambda comm: steps_of(comm, rp.ScaleCom(DENSITY, low_pass=low_pass), 10))
    for step in range(10):
        root, indices = step % size, sent_at(histories[0][step][2])
        for rank, history in enumerate(histories):
            before, gradient, sent, after = history[step]
            p = before + gradient
            if rank == root:
                assert sent_at(sent) == largest(p.abs(), K), "cyclic: the ranks take turns"
            left = p.clone()
            left[list(indices)] = 0.0
            expected = left if low_pass == 1.0 else (left - before) * low_pass + before
            assert same_bytes(after, expected)


def test_without_the_filter_it_is_error_feedback_and_momentum_comes_after() -> None:
    policy = rp.ScaleCom(0.05, low_pass=1.0)
    other = dataclasses.replace(rp.IWP(0.05, correction="global"), score=policy.score, roots=policy.roots)
    runs = [rp.simulate(3, lambda comm, p=p: train(comm, p, sgd, 12)[0])[0] for p in (policy, other)]
    assert same_bytes(*runs)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_filter_needs_no_overlap(overlap: bool) -> None:
    """Without it there is no spare copy of the state; the filter keeps the old residual all the same."""
    expected = rp.simulate(3, lambda comm: train(comm, rp.ScaleCom(0.05), sgd, 12)[0])
    got = rp.simulate(3, lambda comm: train(comm, rp.ScaleCom(0.05), sgd, 12, overlap=overlap)[0])
    assert same_bytes(got[0], expected[0])


def test_the_filter_comes_after_what_rounding_gives_back() -> None:
    """Coded values: what is left over of p is what the wire dropped, and only a share of it is kept."""

    def residual(comm: rp.comm.Communicator, low_pass: float) -> Tensor:
        layer = OneLayer(comm, rp.ScaleCom(DENSITY, low_pass=low_pass, values="int8"))
        layer.step(gradient_of(comm.rank, 0))
        return layer.kept()

    whole, part = (rp.simulate(2, lambda comm, b=b: residual(comm, b)) for b in (1.0, 0.25))
    for rank in range(2):
        assert same_bytes(part[rank], whole[rank] * 0.25)


@pytest.mark.parametrize("low_pass", [1e-3, 0.1])
def test_tensors_that_travel_dense_are_not_filtered(low_pass: float) -> None:
    """What rounding drops of them is sent later, all of it."""
    runs = [
        rp.simulate(2, lambda comm, p=p: train(comm, p, sgd, 6)[0])[0]
        for p in (rp.ScaleCom(1.0, low_pass=b, dense_values="int8") for b in (low_pass, 1.0))
    ]
    assert same_bytes(*runs)


# -- order of the roots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_cyclic_roots_take_turns(size: int) -> None:
    assert [Roots(1, "cyclic").of(7, step, 3, size) for step in range(20)] == [(step % size,) for step in range(20)]


@pytest.mark.parametrize(("count", "size"), [(2, 4), (2, 5), (3, 4), (4, 4)])
def test_several_cyclic_roots_are_distinct_and_each_rank_has_as_many_turns(count: int, size: int) -> None:
    turns = [Roots(count, "cyclic").of(0, step, 0, size) for step in range(size)]
    assert all(len(set(roots)) == count for roots in turns)
    assert sorted(rank for roots in turns for rank in roots) == sorted(list(range(size)) * count)


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [({"turns": 2}, range(0, 16, 2)), ({"refresh": 8, "density": Density(0.05, Warmup(8, start=0.1))}, range(8))],
)
def test_every_rank_chooses_where_tensors_take_turns_and_in_a_warm_up_with_a_core(slots: Any, chosen: range) -> None:
    """Counted by steps, two of the four ranks would never choose of a tensor whose turn is every second step.

    Counted by refreshes, one rank alone would choose at all eight steps of the warm-up.
    """
    size, policy = 4, dataclasses.replace(rp.ScaleCom(0.05, low_pass=1.0), **slots)
    histories = rp.simulate(size, lambda comm: steps_of(comm, policy, chosen.stop))
    for turn, step in enumerate(chosen):
        before, gradient, _, _ = histories[turn % size][step]
        sent = sent_at(histories[0][step][2])
        assert sent == largest((before + gradient).abs(), round(policy.density.at(step) * NUMEL)), step


# -- what the analysis rests on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8])
def test_compress_then_average_is_average_then_compress(size: int) -> None:
    """CLT commutes with the mean: sums are in rank order here, so to the bit."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        gradient = gradient_of(comm.rank, 0)
        return gradient, OneLayer(comm, rp.ScaleCom(DENSITY)).step(gradient)

    results = rp.simulate(size, rank)
    mean = torch.zeros(NUMEL)
    for gradient, _ in results:
        mean += gradient
    mean *= 1 / size
    indices = torch.tensor(sorted(largest(results[0][0].abs(), K)))
    compressed = torch.zeros(NUMEL)
    compressed[indices] = mean[indices]
    for _, sent in results:
        assert same_bytes(sent, compressed)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0, 3.0])
def test_contraction_is_that_of_the_lemma(size: int, noise: float) -> None:
    """|y - CLT(y)|^2 <= (d/k + (1 - d/k) rho0) |y|^2, with rho0 that of the top k of the mean y, d of which are missed.

    The lemma is one of expectations: it takes what is missed of the top k for a random part of it. A root misses its
    smallest entries first, which leaves room; with noise 0 all ranks choose alike, and both sides are rho0.
    """
    bounds, contractions = [], []
    for seed in range(8):

        def rank(comm: rp.comm.Communicator, seed: int = seed) -> tuple[Tensor, Tensor]:
            draw = torch.Generator().manual_seed(seed)
            common = torch.randn(NUMEL, generator=draw)
            own = torch.randn(NUMEL, generator=draw.manual_seed(1000 * (seed + 1) + comm.rank))
            gradient = common + noise * own
            return gradient, OneLayer(comm, rp.ScaleCom(DENSITY)).step(gradient)

        results = rp.simulate(size, rank)
        mean = (torch.stack([gradient for gradient, _ in results]).double().sum(0) / size).float()
        top = mean.abs().topk(K)
        missed = K - len(largest(mean.abs(), K) & sent_at(results[0][1]))
        energy = float(mean.square().sum())
        rho0 = 1 - float(top.values.square().sum()) / energy
        bounds.append(missed / K + (1 - missed / K) * rho0)
        contractions.append(float((mean - results[0][1]).square().sum()) / energy)
    assert sum(contractions) <= sum(bounds) * (1 + 1e-6)
    assert (sum(bounds) == pytest.approx(sum(contractions))) == (noise == 0.0)


# -- steps not made, checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_skipped_step_leaves_the_filtered_residual_as_it_was(overlap: bool) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.ScaleCom(0.05), adamw, nonfinite="skip", overlap=overlap)
        run(model, optimizer, comm.rank, 3)
        before, state = weights(model), optimizer.state_dict()["ringprune"]
        optimizer.zero_grad()
        (model[0].weight.sum() * (float("nan") if comm.rank else 1.0)).backward()
        optimizer.step()
        after = optimizer.state_dict()["ringprune"]
        assert same_bytes(weights(model), before)
        for name, entry in state["parameters"].items():
            assert all(same_bytes(tensor, after["parameters"][name][kind]) for kind, tensor in entry.items())

    rp.simulate(2, rank)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_pass", [0.0, -0.1, 1.5, float("nan")])
def test_a_filter_out_of_range_is_refused(low_pass: float) -> None:
    with pytest.raises(rp.ConfigurationError, match="low_pass="):
        rp.ScaleCom(low_pass=low_pass)
    with pytest.raises(rp.ConfigurationError, match="low_pass="):
        dataclasses.replace(rp.IWP(), low_pass=low_pass)


@pytest.mark.parametrize("density", [0.0, -1.0, 1.1])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(rp.ConfigurationError, match="density="):
        rp.ScaleCom(density)


def test_a_density_that_rounds_to_nothing_sends_one_entry() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        layer = OneLayer(comm, rp.ScaleCom(1e-9))
        assert len(sent_at(layer.step(gradient_of(comm.rank, 0)))) == 1

    rp.simulate(2, rank)


def test_an_unknown_order_of_roots_is_refused() -> None:
    with pytest.raises(rp.ConfigurationError, match=r"order='cyclical'.*did you mean 'cyclic'"):
        Roots(1, "cyclical")


def test_more_cyclic_roots_than_ranks_are_refused_on_all() -> None:
    policy = dataclasses.replace(rp.ScaleCom(), roots=Roots(3, "cyclic"))

    def rank(comm: rp.comm.Communicator) -> None:
        with pytest.raises(rp.RingPruneError, match="roots=3 with 2 ranks"):
            wrap(make_model(), comm, policy)

    rp.simulate(2, rank)
