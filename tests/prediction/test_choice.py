"""What pays: crossovers lie where the prediction changes sides, mixtures are no worse than what they mix."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringprune as rp
from ringprune.errors import ConfigurationError
from ringprune.plan import Route
from ringprune.prediction import CPU, MARGIN, Link, Setting, best, cheaper_route, crossover, mix, predict
from ringprune.prediction.choice import FASTEST, PRECISION, SLOWEST
from ringprune.prediction.work import work_of
from tests.prediction.made_up import BUCKET_BYTES, FREE, MODEL

SETTING = Setting(MODEL, 8, Link.of_rate(1e9), CPU, BUCKET_BYTES)


def gain(bits: float, density: float) -> float:
    there = replace(SETTING, link=Link.of_rate(bits))
    return predict(there, rp.Dense()).seconds / predict(there, rp.IWP(density)).seconds - 1


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_a_crossover_has_both_sides(density: float) -> None:
    rate = crossover(SETTING, rp.IWP(density), rp.Dense())
    assert SLOWEST < rate < FASTEST
    assert gain(rate, density) > MARGIN >= gain(rate * PRECISION, density)


def test_fewer_entries_pay_for_longer() -> None:
    free = replace(SETTING, speeds=FREE)
    rates = [crossover(free, rp.IWP(density), rp.Dense()) for density in (0.3, 0.1, 0.01)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_what_never_and_what_always_pays() -> None:
    slow = replace(SETTING, speeds=replace(FREE, provenance="slow", select=dict.fromkeys(FREE.select, 1.0)))
    assert crossover(slow, rp.IWP(0.01), rp.Dense()) == 0
    assert crossover(replace(SETTING, speeds=FREE), rp.Dense(), rp.IWP(0.01)) == 0
    # A message less where the latency is a second: at every rate.
    late = replace(SETTING, speeds=FREE, ranks=2)
    link_of = partial(Link.of_rate, latency_seconds=1.0)
    assert crossover(late, rp.Dense(), rp.DGC(0.6), link_of=link_of) == math.inf
    with pytest.raises(ConfigurationError, match="margin"):
        crossover(SETTING, rp.IWP(0.01), rp.Dense(), margin=-0.1)


@given(st.floats(1e6, 1e12), st.sampled_from([0.3, 0.1, 0.01]), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_mixture_is_no_worse_than_all_packed_or_all_dense(bits: float, density: float, ranks: int) -> None:
    policy = rp.IWP(density)
    setting = replace(SETTING, link=Link.of_rate(bits), ranks=ranks)
    found = mix(setting, policy)
    buckets = MODEL.plan(policy, BUCKET_BYTES).buckets
    whole = tuple[Route, ...]("dense" for _ in buckets)
    seconds = [predict(setting, policy, routes).seconds for routes in (None, whole)]
    assert found.prediction.seconds <= min(seconds)
    assert found.packed == sum(bucket.route == "packed" for bucket in buckets)
    assert found.dense == sum(a != b.route for a, b in zip(found.routes, buckets, strict=True))
    assert predict(setting, policy, found.routes) == found.prediction


@given(st.floats(1e3, 1e12), st.integers(1, 100))
@settings(max_examples=40, deadline=None)
def test_the_cheaper_route_is_the_cheaper_one(rate: float, ranks: int) -> None:
    policy, setting = rp.IWP(0.01), replace(SETTING, link=Link(rate), ranks=ranks)
    for bucket in MODEL.plan(policy, BUCKET_BYTES).buckets:
        route, saved = cheaper_route(bucket, policy, setting)
        if bucket.route == "packed":
            other: Route = "dense" if route == "packed" else "packed"
            theirs, ours = (
                work_of(bucket, policy, ranks, CPU, way).seconds(setting.link, ranks) for way in (other, route)
            )
            assert saved == pytest.approx(theirs - ours, rel=1e-6, abs=1e-15)
            assert saved >= 0


def test_one_rank_packs_nothing_and_a_slow_link_everything() -> None:
    assert mix(replace(SETTING, ranks=1), rp.IWP(0.01)).dense == 6
    assert mix(replace(SETTING, link=Link(1e4)), rp.IWP(0.01)).dense == 0


def test_the_best_is_the_first_that_is_near_enough() -> None:
    assert best({"dense": 1.04, "iwp": 1.0}) == "dense"
    assert best({"dense": 1.06, "iwp": 1.0}) == "iwp"
    assert best({"dense": 2.0, "a": 1.03, "b": 1.0}) == "a"
    assert best({"dense": 1.0}) == "dense"
