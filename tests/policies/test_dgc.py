"""DGC (arXiv 1712.01887): equations 7, 8 and 9, their invariants, the sampled threshold and the paper's warm-up."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.selection import Density
from tests.policies.one_layer import NUMEL, OneLayer, gradient_of, largest, sent_at
from tests.test_laws import reference
from tests.training import make_model, nesterov, run, same_bytes, sgd, train, wrap

DENSITY = 0.02
K = round(DENSITY * NUMEL)
EPS = torch.finfo(torch.float32).eps
MOMENTUM = 0.9

both = pytest.mark.parametrize("index_sets", ["gathered", "scattered"])
selections = pytest.mark.parametrize("selection", ["exact", "sampled"])


def history_of(
    comm: rp.comm.Communicator, policy: rp.Policy, steps: int, **options: Any
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each step the gradient, the average that came back, and residual and velocity after it."""
    layer, history = OneLayer(comm, policy, **options), []
    for step in range(steps):
        gradient = gradient_of(comm.rank, step)
        average = layer.step(gradient)
        velocity = layer.kept("velocity") if options.get("momentum") else torch.zeros(NUMEL)
        history.append((gradient, average, layer.kept(), velocity))
    return history


# -- equations 7 and 9 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@both
@pytest.mark.parametrize("make", [sgd, nesterov])
def test_eq_3_is_eq_7_at_density_one_momentum_sgd(size: int, index_sets: Any, make: Any) -> None:
    """Up to the order of sums; the bound is that of tests/test_laws.py."""
    expected = rp.simulate(size, lambda comm: reference(comm, make, 50))
    got = rp.simulate(size, lambda comm: train(comm, rp.DGC(1.0, index_sets=index_sets), make, 50)[0])
    group = make([torch.zeros(1)]).param_groups[0]
    bound = 2 * 50 * group["lr"] / (1 - group["momentum"]) * (size + 4) * EPS * expected[0][1]
    assert (got[0] - expected[0][0]).abs().max() <= bound + 4 * EPS * expected[0][0].abs().max()


@pytest.mark.parametrize("size", [1, 3])
@both
@selections
@pytest.mark.parametrize("masked", [True, False])
def test_eq_7_what_was_sent_and_the_residual_are_the_accumulated_velocity(
    size: int, index_sets: Any, selection: Any, masked: bool
) -> None:
    """U = m u + g; v = v + u; sum of sent + v = sum of u, on every rank, with u cleared where something was sent."""
    policy = rp.DGC(DENSITY, index_sets=index_sets, selection=selection, mask_velocity=masked)
    histories = rp.simulate(size, lambda comm: history_of(comm, policy, 12, momentum=MOMENTUM))
    averages = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(12)]
    for history in histories:
        u = torch.zeros(NUMEL)
        v = accumulated = sent = bulk = torch.zeros(NUMEL, dtype=torch.float64)
        for step, (gradient, _, residual, velocity) in enumerate(history):
            u = MOMENTUM * u + gradient
            accumulated, bulk = accumulated + u.double(), bulk + u.double().abs()
            at = residual == 0  # a residual is zero nowhere else
            leaves = torch.where(at, v + u.double(), 0.0)
            averages[step] += leaves / size
            sent, v = sent + leaves, residual.double()
            if masked:
                u = torch.where(at, 0.0, u)
            assert torch.allclose(velocity, u, rtol=1e-5, atol=1e-6)
            assert ((accumulated - sent - v).abs() <= 4 * EPS * bulk).all()
            u = velocity
    for step, average in enumerate(averages):
        assert torch.allclose(histories[0][step][1].double(), average, rtol=1e-5, atol=1e-5)


@both
@selections
def test_eq_9_after_a_send_residual_and_velocity_are_zero_there_and_only_there(index_sets: Any, selection: Any) -> None:
    """Each rank at its own set, whatever the others sent."""
    policy = rp.DGC(DENSITY, index_sets=index_sets, selection=selection)
    histories = rp.simulate(3, lambda comm: history_of(comm, policy, 6, momentum=MOMENTUM))
    for step in range(6):
        own = []
        for history in histories:
            _, _, residual, velocity = history[step]
            assert torch.equal(residual == 0, velocity == 0)
            own.append(set((residual == 0).nonzero().flatten().tolist()))
            assert math.ceil(0.8 * K) <= len(own[-1]) <= K
            assert selection == "sampled" or len(own[-1]) == K
        assert sent_at(histories[0][step][1]) == set().union(*own)
        assert own[0] != own[1]


def test_eq_9_can_be_left_out() -> None:
    history = rp.simulate(1, lambda comm: history_of(comm, rp.DGC(DENSITY, mask_velocity=False), 3, momentum=MOMENTUM))
    assert all((velocity != 0).all() and (residual == 0).sum() == K for _, _, residual, velocity in history[0])


@both
def test_each_rank_sends_the_largest_of_its_own_residual(index_sets: Any) -> None:
    histories = rp.simulate(3, lambda comm: history_of(comm, rp.DGC(DENSITY, index_sets=index_sets), 8))
    for history in histories:
        before = torch.zeros(NUMEL)
        for gradient, _, residual, _ in history:
            assert set((residual == 0).nonzero().flatten().tolist()) == largest((before + gradient).abs(), K)
            before = residual


# -- momentum 0 -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("beside", [None, 0.9])
def test_without_momentum_it_is_plain_error_feedback(index_sets: Any, beside: float | None) -> None:
    """E = e + g; send the top k; e = 0 there. To the bit, also beside a group whose momentum is corrected."""

    def rank(comm: rp.comm.Communicator) -> None:
        weight, other = nn.Parameter(torch.zeros(64, 80)), nn.Parameter(torch.zeros(64, 80))
        groups: list[dict[str, Any]] = [{"params": [weight], "momentum": 0.0}]
        if beside is not None:
            groups.append({"params": [other], "momentum": beside})
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(groups, lr=0.1),
            [("weight", weight), ("other", other)][: len(groups)],
            policy=rp.DGC(DENSITY, index_sets=index_sets),
            comm=comm,
        )
        e = torch.zeros(NUMEL)
        for step in range(6):
            gradient = gradient_of(comm.rank, step)
            optimizer.zero_grad()
            ((weight + other) * gradient.view(64, 80)).sum().backward()
            optimizer.step()
            e = e + gradient
            e[list(largest(e.abs(), K))] = 0.0
            state = optimizer.state_dict()["ringprune"]["parameters"]
            assert same_bytes(state["weight"]["residual"].flatten(), e)

    rp.simulate(2, rank)


# -- equation 8 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_eq_8_each_rank_clips_to_the_bound_over_sqrt_n_before_accumulation(size: int) -> None:
    bound = 0.5

    def rank(comm: rp.comm.Communicator) -> None:
        layer = OneLayer(comm, rp.DGC(DENSITY, clip_norm_per_tensor=bound), momentum=MOMENTUM)
        gradient = gradient_of(comm.rank, 0)
        layer.step(gradient)
        clipped = gradient * (bound / math.sqrt(comm.size) / float(gradient.norm()))
        kept = layer.kept()
        assert torch.allclose(kept[kept != 0], clipped[kept != 0], rtol=1e-5)
        assert float(clipped.norm()) == pytest.approx(bound / math.sqrt(size), rel=1e-5)

    rp.simulate(size, rank)


# -- the sampled threshold, warm-up -----------------------------------------------------------------------------------


def test_a_sampled_threshold_sends_a_fifth_less_at_most() -> None:
    stats = [
        rp.simulate(3, lambda comm, s=s: train(comm, rp.DGC(0.05, selection=s), sgd, 10)[1].stats())[0]
        for s in ("exact", "sampled")
    ]
    assert 0.8 * stats[0]["realised_density"] <= stats[1]["realised_density"] <= stats[0]["realised_density"]
    assert stats[1]["bytes_values"] <= stats[0]["bytes_values"]


def test_warm_up_of_the_paper_keeps_a_quarter_of_the_entries_more_in_each_epoch() -> None:
    """25, 6.25, 1.5625 and 0.4 % in the first four epochs, then 0.1 %; here the density falls within epochs too."""
    epoch = 500
    density = Density(0.001, rp.Warmup(4 * epoch, start=0.25))
    for number, paper in enumerate((0.25, 0.0625, 0.015625, 0.004, 0.001)):
        assert density.at(number * epoch) == pytest.approx(paper, rel=0.02)
    assert density.at(5 * epoch) == 0.001


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_selection_is_refused() -> None:
    with pytest.raises(rp.ConfigurationError, match=r"selection='sample'.*did you mean 'sampled'"):
        rp.DGC(selection="sample")


@pytest.mark.parametrize("density", [0.0, -0.1, 2.0])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(rp.ConfigurationError, match="density="):
        rp.DGC(density)


@both
@selections
def test_a_density_that_rounds_to_nothing_sends_one_entry_of_each_rank(index_sets: Any, selection: Any) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        layer = OneLayer(comm, rp.DGC(1e-9, index_sets=index_sets, selection=selection))
        gradient = gradient_of(comm.rank, 0)
        layer.step(gradient)
        assert int((layer.kept() == 0).sum()) == 1
        assert float(layer.kept()[largest(gradient.abs(), 1).pop()]) == 0.0, "the largest, sampled or not"

    rp.simulate(2, rank)


def test_a_sampled_selection_with_nothing_to_select_sends_nothing() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, rp.DGC(0.01, selection="sampled"), sgd)
        optimizer.zero_grad()
        model[4].bias.sum().backward()
        optimizer.step()
        assert optimizer.stats()["realised_density"] == 0.0
        run(model, optimizer, comm.rank, 2)
        assert optimizer.stats()["realised_density"] > 0.0

    rp.simulate(2, rank)
