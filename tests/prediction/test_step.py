"""A step: what takes no time is not there, bounds from both sides, and formulas where one thing alone decides."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringprune as rp
from ringprune.plan import ParamSpec
from ringprune.policies import Policy
from ringprune.prediction import CPU, GPU, Link, Setting, Speeds, flat, predict
from ringprune.prediction.speeds import each_at
from tests.prediction.made_up import BUCKET_BYTES, FREE, MODEL, at

POLICIES = [
    rp.Dense(),
    rp.Dense("fp16"),
    rp.IWP(0.1),
    rp.IWP(0.001, values="int8"),
    rp.IWP(0.01, roots="all", refresh=3),
    rp.DGC(0.01),
    rp.IWP(0.04, local_steps=4),
]
policies = st.sampled_from(POLICIES)
speeds_of = st.sampled_from([FREE, CPU, GPU])
ranks_of = st.integers(1, 40)
LINK = Link(1e9)


@given(policies, speeds_of, ranks_of, st.floats(1e5, 1e12), st.floats(1, 1e5))
@settings(max_examples=60, deadline=None)
def test_a_faster_link_never_makes_a_step_longer(
    policy: Policy, speeds: Speeds, ranks: int, rate: float, factor: float
) -> None:
    setting = Setting(MODEL, ranks, LINK, speeds, BUCKET_BYTES)
    slow, fast = (predict(at(setting, r), policy).seconds for r in (rate, rate * factor))
    assert fast <= slow * (1 + 1e-9)


@given(policies, speeds_of, ranks_of, st.floats(1e6, 1e12))
@settings(max_examples=60, deadline=None)
def test_a_step_lies_between_the_longest_part_and_all_parts_in_a_row(
    policy: Policy, speeds: Speeds, ranks: int, rate: float
) -> None:
    found = predict(at(Setting(MODEL, ranks, LINK, speeds, BUCKET_BYTES), rate), policy)
    busy = found.compute_seconds + found.local_seconds
    slack = 1 + 1e-9
    assert max(busy, found.network_seconds) <= found.seconds * slack
    assert found.seconds <= (busy + found.network_seconds) * slack
    assert found.exposed_seconds == pytest.approx(found.seconds - MODEL.compute_seconds)


@given(policies, speeds_of, ranks_of, st.floats(1e6, 1e12))
@settings(max_examples=60, deadline=None)
def test_messages_that_somebody_has_to_ask_for_hide_behind_no_pass_but_coding(
    policy: Policy, speeds: Speeds, ranks: int, rate: float
) -> None:
    found = predict(at(Setting(MODEL, ranks, LINK, speeds, BUCKET_BYTES, asked=True), rate), policy)
    busy, slack = found.compute_seconds + found.local_seconds, 1 + 1e-9
    assert found.seconds <= (busy + found.network_seconds) * slack
    assert max(busy, found.network_seconds) <= found.seconds * slack
    if policy.values == policy.dense_values == "fp32":
        assert found.local_seconds + max(found.compute_seconds, found.network_seconds) <= found.seconds * slack


@given(policies, st.sampled_from([CPU, GPU]), ranks_of, st.floats(1e6, 1e12))
@settings(max_examples=60, deadline=None)
def test_where_processors_are_shared_messages_hide_behind_compute_alone(
    policy: Policy, speeds: Speeds, ranks: int, rate: float
) -> None:
    setting = at(Setting(MODEL, ranks, LINK, replace(speeds, shared=2.0), BUCKET_BYTES), rate)
    found, slack = predict(setting, policy), 1 + 1e-9
    assert found.local_seconds + max(found.compute_seconds, found.network_seconds) <= found.seconds * slack
    assert found.seconds <= (found.compute_seconds + found.local_seconds + found.network_seconds) * slack
    assert replace(speeds, shared=2.0).times(3).shared == 2.0, "no time, and not three times as long"


@given(policies, st.sampled_from([CPU, GPU]), ranks_of, st.floats(1e6, 1e12), st.floats(1, 8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_waits_for_a_shared_processor_count_in_full(
    policy: Policy, speeds: Speeds, ranks: int, rate: float, factor: float, asked: bool
) -> None:
    setting = at(Setting(MODEL, ranks, LINK, speeds, BUCKET_BYTES, asked=asked), rate)
    shared = replace(setting, speeds=replace(speeds.times(factor), shared=factor))
    alone = predict(setting, policy).local_seconds
    assert predict(shared, policy).local_seconds == pytest.approx(factor * alone)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_one_rank_has_no_network(policy: Policy) -> None:
    found = predict(Setting(MODEL, 1, Link(1.0), CPU, BUCKET_BYTES), policy)
    assert found.network_seconds == 0
    assert found.seconds == pytest.approx(found.compute_seconds + found.local_seconds)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_without_limit_and_latency_only_processors_count(policy: Policy) -> None:
    found = predict(Setting(MODEL, 16, Link(math.inf, 0.0), CPU, BUCKET_BYTES), policy)
    assert found.network_seconds == 0
    assert found.seconds == pytest.approx(found.compute_seconds + found.local_seconds)


@given(st.integers(2, 100), st.floats(1e5, 1e10))
@settings(deadline=None)
def test_a_dense_step_of_one_bucket_is_compute_and_the_formula(ranks: int, rate: float) -> None:
    """One tensor, whose gradient comes last of all: nothing overlaps."""
    model = flat("one", [[(1000, 1000)]], 0.03, "made up")
    found = predict(Setting(model, ranks, Link(rate, 0.0), FREE), rp.Dense())
    share = 2 * (ranks - 1) / ranks
    verdict = Link(rate, 0.0).seconds("allreduce", 12, ranks)
    assert found.seconds == pytest.approx(0.03 + share * 4e6 / rate + verdict)


def test_nothing_but_float32_is_coded() -> None:
    specs = [ParamSpec(f"p{i}", shape, torch.float64, torch.device("cpu"), 0) for i, shape in enumerate(MODEL.shapes)]
    double = replace(MODEL, specs=tuple(specs))
    dear = replace(CPU, encode_values={"bf16": 1.0}, decode_values={"bf16": 1.0})
    found = predict(Setting(double, 4, LINK, dear, BUCKET_BYTES), rp.Dense("bf16"))
    assert found.local_seconds < 1


def test_a_slow_link_is_all_there_is() -> None:
    """Where the network is never idle once the first bucket is there, it decides alone."""
    setting = Setting(MODEL, 4, Link(1e3, 0.0), FREE, BUCKET_BYTES)
    found = predict(setting, rp.Dense())
    first = MODEL.forward_seconds + MODEL.layers[-1].backward_seconds
    assert found.seconds == pytest.approx(first + found.network_seconds, rel=1e-6)


def test_local_steps_divide_the_exchange_and_hide_it_behind_nothing() -> None:
    setting = Setting(MODEL, 4, Link(1e6), CPU, BUCKET_BYTES)
    one, four = (predict(setting, rp.IWP(0.04, local_steps=count)) for count in (1, 4))
    assert one.exposed_seconds == pytest.approx(one.local_seconds + one.network_seconds, rel=0.2)
    assert four.exposed_seconds == pytest.approx(one.exposed_seconds / 4)
    assert sum(four.bytes_sent.values()) == pytest.approx(sum(one.bytes_sent.values()) / 4)


def test_another_compute_time_keeps_the_shape_of_the_timeline() -> None:
    longer = MODEL.taking(10 * MODEL.compute_seconds, "ten times")
    assert longer.compute_seconds == pytest.approx(10 * MODEL.compute_seconds)
    assert longer.forward_seconds == pytest.approx(10 * MODEL.forward_seconds)
    assert longer.shapes == MODEL.shapes
    assert longer.provenance == "ten times"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_slower_processor_takes_longer_in_proportion(policy: Policy) -> None:
    setting = Setting(MODEL, 8, LINK, CPU, BUCKET_BYTES)
    once, thrice = predict(setting, policy), predict(replace(setting, speeds=CPU.times(3)), policy)
    assert thrice.local_seconds == pytest.approx(3 * once.local_seconds)
    assert (thrice.network_seconds, thrice.bytes_sent) == (once.network_seconds, once.bytes_sent)


def test_a_timeline_without_time_is_spread_by_entries() -> None:
    found = replace(
        MODEL, layers=tuple(replace(one, forward_seconds=0.0, backward_seconds=0.0) for one in MODEL.layers)
    ).taking(0.3, "spread")
    assert found.compute_seconds == pytest.approx(0.3)
    assert found.shapes == MODEL.shapes
    per_entry = [layer.backward_seconds / sum(map(math.prod, layer.shapes)) for layer in found.layers]
    assert per_entry == pytest.approx([0.2 / MODEL.entries] * len(per_entry))


def test_what_processors_need_counts_in_full() -> None:
    """The processor does one thing after the other."""
    slow = replace(FREE, provenance="select", select=dict.fromkeys(FREE.select, 1e-6))
    setting = Setting(MODEL, 1, LINK, FREE, BUCKET_BYTES)
    packed = sum(bucket.numel for bucket in MODEL.plan(rp.IWP(0.01)).buckets if bucket.route == "packed")
    extra = predict(replace(setting, speeds=slow), rp.IWP(0.01)).seconds - predict(setting, rp.IWP(0.01)).seconds
    assert extra == pytest.approx(1e-6 * packed)


def test_selecting_many_takes_longer() -> None:
    each = {"apart": 1e-9, "close": 2e-9}
    workload = flat("matrix", [((1000, 1000),)], 0.0, "made up")
    for density, cost in {0.001: 1e-9, 0.01: 1e-9, 0.1: 2e-9}.items():
        found = predict(Setting(workload, 4, LINK, replace(FREE, select=each)), rp.IWP(density))
        assert found.local_seconds == pytest.approx(1e6 * cost)


def test_entries_that_lie_close_cost_less_each() -> None:
    each = {"apart": 1e-6, "close": 0.25e-6}
    costs = {0.001: 1e-6, 0.01: 1e-6, 0.1: 0.25e-6, 0.4: 0.25e-6 * 0.25 ** math.log10(4)}
    assert [each_at(each, density) for density in costs] == pytest.approx(list(costs.values()))
    workload = flat("matrix", [((1000, 1000),)], 0.0, "made up")
    for speeds, times in ((replace(FREE, kept=each), 2), (replace(FREE, unite=each), 1)):  # once taken, once put
        for density, cost in costs.items():
            found = predict(Setting(workload, 4, LINK, speeds), rp.IWP(density, roots="all"))
            assert found.local_seconds == pytest.approx(times * density * 1e6 * cost)
