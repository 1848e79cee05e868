"""Sparse gradients that travel as rows: the same averages whichever way they go, sparse, on all ranks or on none."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune.residual import Clipping
from tests.tables import (
    EPS,
    LENGTH,
    WAYS,
    Lookup,
    Table,
    drawn,
    exact,
    loss_of_words,
    make_words,
    tables_of,
    within,
)
from tests.training import same_bytes, weights

WIDTH = 4
ways = pytest.mark.parametrize("way", WAYS)
choices = pytest.mark.parametrize("way", ["auto", *WAYS])


def averages(
    lookups: Sequence[Lookup | None], policy: rp.Policy, length: int = LENGTH, width: int = WIDTH, **options: Any
) -> list[Tensor]:
    """Each rank's ``grad`` after a step."""

    def rank(comm: rp.comm.Communicator) -> Tensor:
        return Table(comm, policy, length, width, **options).step(lookups[comm.rank])

    return rp.simulate(len(lookups), rank)


@st.composite
def batches_of_ranks(draw: st.DrawFn) -> list[Lookup | None]:
    """One to five ranks' lookups: none, a few, the same row many times, more than the table has."""
    size, key = draw(st.integers(1, 5)), draw(st.integers(0, 10**6))
    counts = draw(st.lists(st.sampled_from([None, 0, 1, 7, 40, 200]), min_size=size, max_size=size))
    if all(count is None for count in counts):
        counts[0] = 0  # step() before backward() on all ranks is an error
    return [None if n is None else drawn(key + rank, n, LENGTH, WIDTH) for rank, n in enumerate(counts)]


@settings(deadline=None, max_examples=30)
@given(batches_of_ranks(), st.sampled_from(("auto", *WAYS)), st.sampled_from(["average", "sum"]))
def test_the_average_is_sparse_and_has_the_rows_of_all_ranks(lookups: list[Lookup | None], way: str, op: str) -> None:
    """Within the roundings of float32: one per lookup and rank, and the division."""
    union, total, magnitude = exact(lookups, LENGTH, WIDTH)
    share = len(lookups) if op == "average" else 1
    terms = sum(len(lookup[0]) for lookup in lookups if lookup is not None) + len(lookups) + 2
    grads = averages(lookups, rp.Parallax(way), op=op)
    for grad in grads:
        assert grad.is_sparse
        assert grad.is_coalesced()
        assert torch.equal(grad.indices()[0], union)
        assert within(grad.to_dense(), total / share, magnitude / share, terms)
        assert same_bytes(grad.values(), grads[0].values())


@ways
def test_the_average_is_that_of_dense_gradients(way: str) -> None:
    lookups = [drawn(rank, 30, LENGTH, WIDTH) for rank in range(3)]
    _, _, magnitude = exact(lookups, LENGTH, WIDTH)
    rows, dense = (averages(lookups, policy)[0].to_dense() for policy in (rp.Parallax(way), rp.Dense()))
    assert within(rows, dense.double(), magnitude / 3, 2 * (90 + 3))


@choices
def test_a_padding_row_is_sent_and_stays_zero(way: str) -> None:
    """Torch leaves it out of the gradient."""
    lookups = [([0, 5, 5, 9 + rank], torch.ones(4, WIDTH)) for rank in range(3)]
    for grad in averages(lookups, rp.Parallax(way), padding=5):
        kept = [row for row in grad.indices()[0].tolist() if bool(grad.to_dense()[row].any())]
        assert kept == [0, 9, 10, 11]


@choices
def test_tables_of_sixteen_bits_are_summed_in_float32(way: str) -> None:
    """1 + 256 times 2^-8 is 2, in bfloat16 it would stay 1: on one rank, and over ranks."""
    small = torch.full((257, WIDTH), 2.0**-8)
    small[0] = 1.0
    alone = [([3] * 257, small), ([], torch.empty(0, WIDTH))]
    assert all(bool((g.to_dense()[3] == 1.0).all()) for g in averages(alone, rp.Parallax(way), dtype=torch.bfloat16))
    spread: list[Lookup | None] = [([3], torch.full((1, WIDTH), 1.0 if rank == 0 else 2.0**-9)) for rank in range(5)]
    for grad in averages(spread, rp.Parallax(way), dtype=torch.bfloat16, op="sum"):
        assert grad.dtype == torch.bfloat16
        assert bool((grad.to_dense()[3] == 1.0 + 2.0**-7).all())


@choices
def test_float64_stays_float64(way: str) -> None:
    lookups: list[Lookup | None] = [([3], torch.full((1, WIDTH), 1.0 + rank * 2.0**-20)) for rank in range(3)]
    for grad in averages(lookups, rp.Parallax(way, values="bf16"), dtype=torch.float64, op="sum"):
        assert bool((grad.to_dense()[3] == 3 + 3 * 2.0**-20).all())


@choices
@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_coded_rows_are_the_same_bytes_everywhere(way: str, values: str) -> None:
    lookups = [drawn(rank, 30, LENGTH, WIDTH) for rank in range(3)]
    union, total, magnitude = exact(lookups, LENGTH, WIDTH)
    grads = averages(lookups, rp.Parallax(way, values=values), op="sum")
    unit = 2.0**-8 if values == "bf16" else 2.0**-11
    bound = (2 * unit + unit * unit + 93 * EPS) * magnitude + 4 * 2.0**-24 * float(magnitude.max())
    for grad in grads:
        assert torch.equal(grad.indices()[0], union)
        assert bool(((grad.to_dense().double() - total).abs() <= bound).all())
        assert same_bytes(grad.values(), grads[0].values())


# -- training ---------------------------------------------------------------------------------------------------------

MAKE = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "sparse adam": lambda params: torch.optim.SparseAdam(params, lr=0.05, eps=1e-2),
}
STEPS = 6


def train_words(
    comm: rp.comm.Communicator, policy: rp.Policy, make: Any, steps: int = STEPS, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Tables by ``make``, the layer by SGD; each has a wrapper, so that SparseAdam sees sparse gradients alone."""
    model = make_words()
    parts = [make(tables_of(model)), torch.optim.SGD(model["out"].parameters(), lr=0.1)]
    # Both have exchanges under way at a time: over one communicator ranks would start them in different orders.
    optimizers = [
        rp.DistributedOptimizer(part, model.named_parameters(), policy=policy, comm=own, model=model, **options)
        for part, own in zip(parts, (comm, comm.duplicate()), strict=True)
    ]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of_words(model, comm.rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(model), optimizers[0].stats()


def joined(make: Any, size: int) -> Tensor:
    """One process, whose batch is those of all ranks."""
    model = make_words()
    optimizers = [make(tables_of(model)), torch.optim.SGD(model["out"].parameters(), lr=0.1)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of_words(model, rank, step) for rank in range(size)).div(size).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # in torch's own Adagrad
@pytest.mark.parametrize("name", MAKE)
def test_training_ends_at_the_same_weights_whichever_way(name: str) -> None:
    """Simulated ranks add in their order, so to the bit; and as one process on all batches, up to rounding."""
    size = 3
    expected = joined(MAKE[name], size)
    runs = [rp.simulate(size, lambda c, w=way: train_words(c, rp.Parallax(w), MAKE[name])) for way in ("auto", *WAYS)]
    for results in runs:
        assert all(same_bytes(got, runs[0][0][0]) for got, _ in results)
        assert torch.allclose(results[0][0], expected, rtol=1e-4, atol=1e-5)
    for way, results in zip(WAYS, runs[1:], strict=True):
        assert results[0][1]["rows"] == {name: {way: STEPS} for name in ("words.weight", "bags.weight")}


@choices
def test_a_compressed_exchange_beside_it_is_as_without(way: str) -> None:
    """The layer's wrapper alone, under the same policy, makes the same residuals; tables keep none."""

    def rank(comm: rp.comm.Communicator, policy: rp.Policy, *, tables: bool) -> Any:
        model = make_words()
        # Tables stay, so that both runs have the same gradients.
        groups = [{"params": tables_of(model), "lr": 0.0}] if tables else []
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD([*groups, {"params": model["out"].parameters()}], lr=0.01, momentum=0.9),
            model.named_parameters(),
            policy=policy,
            comm=comm,
            model=model,
            check_every=1,
        )
        for step in range(4):
            optimizer.zero_grad()
            loss_of_words(model, comm.rank, step).backward()
            optimizer.step()
        return weights(model), optimizer.state_dict()["ringprune"]["parameters"]

    policy = replace(rp.IWP(0.1), rows=rp.Rows(way))
    both = rp.simulate(2, lambda comm: rank(comm, policy, tables=True))[0]
    alone = rp.simulate(2, lambda comm: rank(comm, rp.IWP(0.1), tables=False))[0]
    assert same_bytes(both[0], alone[0])
    for kind in ("residual", "velocity"):
        assert same_bytes(both[1]["out.weight"][kind], alone[1]["out.weight"][kind])
    assert {kind for name in ("words.weight", "bags.weight") for kind in both[1][name]} <= {"overlap", "momentum"}


def test_momentum_correction_is_sgd_s_own_momentum_of_tables() -> None:
    """At density 1, all in one SGD; momentum moves rows that nobody looked up, and the gradient stays sparse."""

    def rank(comm: rp.comm.Communicator, policy: rp.Policy) -> Tensor:
        model = make_words()
        optimizer = rp.DistributedOptimizer(
            MAKE["momentum"](model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of_words(model, comm.rank, step).backward()
            optimizer.step()
            assert all(table.grad is not None and table.grad.is_sparse for table in tables_of(model))
        return weights(model)

    own, corrected = (
        rp.simulate(2, lambda comm, p=policy: rank(comm, p))[0]
        for policy in (rp.Parallax(), replace(rp.IWP(1.0), rows=rp.Rows()))
    )
    assert torch.allclose(own, corrected, rtol=1e-4, atol=1e-5)


def test_momentum_of_sparse_gradients_from_before_goes_on() -> None:
    """It is a sparse tensor, and the first step ended in torch's "copy_() between dense and sparse"."""

    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        found = []
        for wrapped in (False, True):
            model = make_words()
            optimizer: Any = MAKE["momentum"](model.parameters())
            for step in range(STEPS):
                if wrapped and step == 2:
                    policy, named = replace(rp.IWP(1.0), rows=rp.Rows()), model.named_parameters()
                    optimizer = rp.DistributedOptimizer(optimizer, named, policy=policy, comm=comm, model=model)
                optimizer.zero_grad()
                loss_of_words(model, 0, step).backward()  # the same batches on all ranks
                optimizer.step()
            found.append(weights(model))
        return found[0], found[1]

    for alone, wrapped in rp.simulate(2, rank):
        torch.testing.assert_close(alone, wrapped, rtol=1e-4, atol=1e-5)


def test_several_backward_passes_are_one_step() -> None:
    def rank(comm: rp.comm.Communicator, passes: int) -> Tensor:
        model = make_words()
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            policy="parallax",
            comm=comm,
            model=model,
            backward_passes_per_step=passes,
        )
        for step in range(0, 4, 2):
            optimizer.zero_grad()
            losses = [loss_of_words(model, comm.rank, step + i) for i in range(2)]
            for loss in losses if passes == 2 else [sum(losses)]:
                loss.backward()
            optimizer.step()
        return weights(model)

    two, one = (rp.simulate(2, lambda comm, p=passes: rank(comm, p))[0] for passes in (2, 1))
    assert torch.allclose(two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clipping", [Clipping(norm=0.5), Clipping(norm_per_tensor=0.3)], ids=["all", "each"])
def test_gradients_are_clipped_by_the_norm_of_their_rows(clipping: Clipping) -> None:
    """As dense ones are, within the roundings of the norm and the sums."""
    lookups = [drawn(rank, 30, LENGTH, WIDTH) for rank in range(3)]
    rows, dense = (averages(lookups, replace(policy, clipping=clipping)) for policy in (rp.Parallax(), rp.Dense()))
    assert all(grad.is_sparse for grad in rows)
    assert torch.allclose(rows[0].to_dense(), dense[0].to_dense(), rtol=1e-5, atol=1e-7)
    bound = clipping.norm or clipping.norm_per_tensor or 0.0
    assert float(rows[0].values().norm()) <= bound / math.sqrt(3) * (1 + 1e-5)


def test_a_loss_scale_is_taken_out_and_an_overflow_skips_the_step_on_all_ranks() -> None:
    def rank(comm: rp.comm.Communicator, scaled: bool) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        table = Table(comm, rp.Parallax(), LENGTH, WIDTH, scaler=scaler)
        for step in range(4):
            table.optimizer.zero_grad()
            rows, gradients = drawn(10 * step + comm.rank, 9, LENGTH, WIDTH)
            if scaled and step == 1 and comm.rank == 1:
                gradients = gradients * math.inf
            if not scaled and step == 1:
                continue
            loss = (table.model(torch.tensor(rows)) * gradients).sum()
            scaler.scale(loss).backward()
            if step == 2:
                table.optimizer.synchronize()
                scaler.unscale_(table.optimizer)
                with table.optimizer.skip_synchronize():
                    scaler.step(table.optimizer)
            else:
                scaler.step(table.optimizer)
            scaler.update()
        assert table.optimizer.stats()["skipped_steps"] == int(scaled)
        return weights(table.model)

    scaled, plain = (rp.simulate(2, lambda comm, s=s: rank(comm, s)) for s in (True, False))
    assert same_bytes(scaled[0], plain[0])  # scales are powers of two
    assert same_bytes(scaled[0], scaled[1])
