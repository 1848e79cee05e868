"""Intervals of local steps that grow as the learning rate falls (``LocalSteps(growth=)``)."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringprune as rp
from ringprune.local_steps import MOST, Interval
from tests.training import batches, loss_of, make_model, same_bytes, sgd, weights, wrap

STEPS = 24


def cosine(step: int) -> float:
    """A learning rate that rises for three steps and then falls along half a cosine."""
    return 0.05 * (step + 1) / 3 if step < 3 else 0.05 * 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))


def ends(rates: list[float], count: int, growth: float) -> list[int]:
    """After which steps an exchange is due."""
    choice = rp.LocalSteps(count, growth=growth)
    interval, found = Interval(choice), []
    for step, rate in enumerate(rates, 1):
        interval.stepped([{"lr": rate}, {"lr": rate / 2}])  # the largest counts
        if interval.full:
            found.append(step)
            interval.begin()
    return found


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=60),
    st.integers(1, 5),
    st.floats(0.0, 3.0),
)
def test_an_interval_is_as_long_as_the_formula_says(rates: list[float], count: int, growth: float) -> None:
    found, highest, gone, steps = [], 0.0, 0.0, 0
    for step, rate in enumerate(rates, 1):
        highest = max(highest, rate)
        gone, steps = gone + (rate / highest) ** growth, steps + 1
        if gone >= count or steps == MOST * count:
            found.append(step)
            gone, steps = gone - count if gone >= count else 0.0, 0
    assert ends(rates, count, growth) == found


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=60), st.integers(1, 5))
def test_there_are_as_many_exchanges_as_the_rates_make_whole_counts(rates: list[float], count: int) -> None:
    """So the bytes of a run are known from its schedule: no interval is rounded up."""
    rates = [1.0, *rates]
    made = len(ends(rates, count, 1.0))
    assert made in (math.floor(sum(rates) / count - 1e-9), math.floor(sum(rates) / count + 1e-9))


@given(st.floats(1e-6, 10.0), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_at_one_rate_every_interval_has_count_steps(rate: float, count: int, growth: float) -> None:
    assert ends([rate] * 20, count, growth) == list(range(count, 21, count))


def test_rates_of_zero_do_not_end_the_exchanges() -> None:
    """A warm-up that begins at 0, and a schedule that ends there."""
    assert ends([0.0, 0.0, 0.0, 1.0, 1.0] + [0.0] * 40, 2, 1.0) == [2, 4, 4 + 32]


def train(comm: rp.comm.Communicator, policy: rp.Policy, upto: int, rate: Any = cosine) -> tuple[Any, Any, list[int]]:
    model = make_model()
    optimizer = wrap(model, comm, policy, sgd)
    return model, optimizer, go_on(comm, model, optimizer, 0, upto, rate)


def go_on(comm: Any, model: Any, optimizer: Any, start: int, upto: int, rate: Any = cosine) -> list[int]:
    """After which steps weights were exchanged; the first step has the ranks compare where they start."""

    def bytes_exchanged() -> float:
        stats = optimizer.stats()
        return float(stats["bytes_values"] + stats["bytes_dense"])

    sent = []
    for step, batch in zip(range(start, upto), batches(comm.rank, upto - start, start), strict=True):
        optimizer.param_groups[0]["lr"] = rate(step)
        before = bytes_exchanged()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if bytes_exchanged() > before:
            sent.append(step + 1)
    return sent


GROWING = rp.IWP(0.1, roots="all", local_steps=rp.LocalSteps(2, momentum="shared", growth=1.0))


def test_exchanges_become_rare_as_the_rate_falls() -> None:
    expected = ends([cosine(step) for step in range(STEPS)], 2, 1.0)
    sent = rp.simulate(2, lambda comm: train(comm, GROWING, STEPS)[2])
    assert sent == [expected, expected]
    gaps = [after - before for before, after in itertools.pairwise(expected)]
    assert gaps[:2] == [3, 2]  # 2 and a bit
    assert max(gaps) >= 4


@pytest.mark.parametrize("stop", range(1, 12, 2))
def test_a_resumed_run_exchanges_at_the_same_steps(stop: int) -> None:
    """Law 6, wherever in an interval and before or after the highest rate it stops."""

    def rank(comm: rp.comm.Communicator) -> bool:
        model, optimizer, _ = train(comm, GROWING, STEPS)
        expected = weights(model)
        optimizer.close()
        model, optimizer, _ = train(comm, GROWING, stop)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        optimizer.close()
        model = make_model(1)
        model.load_state_dict(saved["model"])
        optimizer = wrap(model, comm, GROWING, sgd)
        optimizer.load_state_dict(saved["optimizer"])
        go_on(comm, model, optimizer, stop, STEPS)
        return same_bytes(weights(model), expected)

    assert rp.simulate(2, rank) == [True, True]


def test_ranks_whose_rates_differ_are_told_so_on_all_ranks() -> None:
    """A scheduler that looks at its own rank's loss: the ranks would exchange at different steps."""

    def rank(comm: rp.comm.Communicator) -> bool:
        rate = cosine if comm.rank else lambda step: 0.05 if step < 4 else 0.005
        with pytest.raises(rp.UsageError, match=r"different numbers of steps.*growth=.*all ranks' schedulers"):
            train(comm, GROWING, STEPS, rate)
        return True

    assert all(rp.simulate(3, rank, timeout=60))


def test_a_flush_may_come_after_different_numbers_of_steps() -> None:
    def rank(comm: rp.comm.Communicator) -> torch.Tensor:
        model, optimizer, _ = train(comm, GROWING, 3 + comm.rank % 2)
        optimizer.flush()
        return weights(model)

    first, second = rp.simulate(2, rank, timeout=60)
    assert same_bytes(first, second)


@pytest.mark.parametrize("growth", [0.0, 1.0])
def test_a_flush_beside_another_rank_s_exchange_is_told_to_both(growth: float) -> None:
    """One rank's exchange at the end of an interval was paired with the other's flush, and then both waited."""
    policy = rp.Dense(local_steps=rp.LocalSteps(4, growth=growth))

    def rank(comm: rp.comm.Communicator) -> torch.Tensor:
        model, optimizer, _ = train(comm, policy, 3, lambda step: 0.05)
        start = shared_bytes(model, optimizer)
        with pytest.raises(rp.UsageError, match=r"some ranks call flush\(\).*equally often.*is undone"):
            if comm.rank:
                optimizer.flush()
            else:
                go_on(comm, model, optimizer, 3, 4, lambda step: 0.05)
        assert same_bytes(weights(model), start)
        go_on(comm, model, optimizer, 4, 8, lambda step: 0.05)  # nothing is in the way of going on together
        return weights(model)

    first, second = rp.simulate(2, rank, timeout=60)
    assert same_bytes(first, second)


def shared_bytes(model: Any, optimizer: Any) -> torch.Tensor:
    with optimizer.shared_weights():
        return weights(model)


def test_the_longest_intervals_of_many_ranks_are_compared_without_overflow() -> None:
    """16 times 512 steps, squared and summed over 34 ranks, are beyond 32 bits: equal ranks were told they differ."""
    long = rp.Dense(local_steps=rp.LocalSteps(512, growth=1.0))

    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer, _ = train(comm, long, 1)
        optimizer._mode._interval.steps = MOST * 512 - 1
        assert go_on(comm, model, optimizer, 1, 2) == [2]

    rp.simulate(34, rank, timeout=60, one_at_a_time=True)


def test_a_failure_of_the_wrapped_optimizer_goes_before_what_follows_from_it() -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        model, optimizer, _ = train(comm, GROWING, 2)
        rates = itertools.repeat(0.05 if comm.rank else 0.005)
        if comm.rank:
            optimizer._inner.step = lambda: (_ for _ in ()).throw(RuntimeError("out of luck"))
        with pytest.raises(rp.UsageError, match=r"rank 1: RuntimeError.*out of luck"):
            go_on(comm, model, optimizer, 2, STEPS, lambda step: next(rates))

    rp.simulate(2, rank, timeout=60)


def test_a_refused_interval_counts_as_made_of_its_steps() -> None:
    """The dense equivalent is of all steps, whatever became of them."""

    def rank(comm: rp.comm.Communicator) -> bool:
        rate = cosine if comm.rank else lambda step: 0.05 if step < 4 else 0.005
        model = make_model()
        optimizer = wrap(model, comm, GROWING, sgd)
        with pytest.raises(rp.UsageError, match="different numbers"):
            go_on(comm, model, optimizer, 0, STEPS, rate)
        stats = optimizer.stats()
        return bool(stats["dense_equivalent_bytes"] >= stats["steps"] * 4 * weights(model).numel())

    assert all(rp.simulate(2, rank, timeout=60))


@pytest.mark.parametrize("growth", [-1.0, math.inf, math.nan, "1"])
def test_no_growth(growth: Any) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match="growth"):
        rp.LocalSteps(4, growth=growth)
