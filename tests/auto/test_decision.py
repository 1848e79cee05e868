"""What is chosen from what was predicted and timed: within the margin of the best, soon, and for a reason."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringprune as rp
from ringprune.auto.decision import MIXED, TRIALS, as_exchanged, choose, options, sentence, workload_of
from ringprune.plan import ParamSpec
from ringprune.prediction import CPU, Setting, flat, mix, predict
from ringprune.routing import Named
from ringprune.timeline import Times
from tests.auto.made_up import made_up_link

NAMES = ["dense", "IWP 1 % bf16"]
seconds_of = st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=6)


def rounds(
    truth: list[float], predicted: list[float], compute: float, settled: int, hysteresis: float, *, known: bool = False
) -> list[int]:
    """One round as the pilot makes it: what training is with, one after the other; all ``known`` from rounds before."""
    ratios = {i: t / p for i, (t, p) in enumerate(zip(truth, predicted, strict=True)) if known or i == settled}
    tried, went = {settled}, [settled]
    while (target := choose(predicted, compute, ratios, tried, settled, margin=0.03, hysteresis=hysteresis)) != went[
        -1
    ]:
        went.append(target)
        if target in tried:
            break
        ratios[target] = truth[target] / predicted[target]
        tried.add(target)
    return went


@given(seconds_of, st.data())
@settings(max_examples=300)
def test_a_round_ends_with_the_best_of_what_was_tried(truth: list[float], data: st.DataObject) -> None:
    wrong = data.draw(st.lists(st.floats(0.3, 3.0), min_size=len(truth), max_size=len(truth)))
    predicted = [a * b for a, b in zip(truth, wrong, strict=True)]
    settled = data.draw(st.integers(0, len(truth) - 1))
    hysteresis = data.draw(st.sampled_from([0.0, 0.1]))
    went = rounds(truth, predicted, min(predicted) * data.draw(st.floats(0.01, 1.0)), settled, hysteresis)
    assert len(set(went)) <= TRIALS
    assert len(went) <= TRIALS + 1
    allowed = 1 + max(0.03, hysteresis)
    # Two steps away from the best: first within the margin of the best, and then not by enough to leave what there was.
    assert truth[went[-1]] <= min(truth[i] for i in went) * allowed * 1.03 * (1 + 1e-9)
    if went[-1] != settled:
        # What is as fast may come out as faster by the last bit of a prediction that was brought into line.
        assert truth[went[-1]] * (1 + hysteresis) < truth[settled] * (1 + 1e-9)


@given(seconds_of)
def test_right_predictions_lead_to_the_best_at_once(truth: list[float]) -> None:
    went = rounds(truth, truth, min(truth), 0, 0.0)
    assert len(went) <= 2
    assert truth[went[-1]] <= 1.03 * min(truth) * (1 + 1e-9)


@given(st.floats(0.1, 10.0), st.integers(2, 5))
def test_nothing_is_left_for_what_is_as_fast(seconds: float, candidates: int) -> None:
    """Nor tried: where an exchange is hidden, nothing can be gained."""
    assert rounds([seconds] * candidates, [seconds] * candidates, seconds, 0, 0.0) == [0]


def test_who_disappoints_is_left_and_who_was_underestimated_is_tried() -> None:
    assert rounds([1.0, 2.0], [1.0, 0.5], 0.1, 0, 0.0) == [0, 1, 0]
    assert rounds([1.0, 0.5], [1.0, 1.05], 0.1, 0, 0.0) == [0, 1]
    assert rounds([1.0, 0.5], [1.0, 1.3], 0.1, 0, 0.0) == [0], "further away than predictions are wrong"


def test_what_there_is_stays_for_a_small_gain() -> None:
    assert rounds([1.0, 0.93], [1.0, 0.93], 0.1, 0, 0.1, known=True) == [0]
    assert rounds([1.0, 0.93], [1.0, 0.93], 0.1, 0, 0.0, known=True) == [0, 1]
    assert rounds([1.0, 0.93], [1.0, 0.93], 0.1, 1, 0.1, known=True) == [1]
    assert rounds([0.8, 0.93], [0.8, 0.93], 0.1, 1, 0.1, known=True) == [1, 0]
    assert rounds([1.0, 0.93], [1.0, 0.93], 0.1, 0, 0.1) == [0, 1, 0], "it might have been enough"


# -- the workload that was timed --------------------------------------------------------------------------------------


def specs_of(*shapes: tuple[int, ...]) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", shape, torch.float32, torch.device("cpu"), 0) for i, shape in enumerate(shapes)]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 0.5))
def test_a_workload_takes_what_was_timed(ready: list[float], after: float) -> None:
    times = Times(max(ready) + after, tuple(ready))
    made = workload_of(specs_of(*[(3, 4)] * len(ready)), [Times(0.0, (0.0,) * len(ready)), times])
    assert made.compute_seconds == pytest.approx(times.compute)
    # A bucket of one parameter starts when its gradient, and those of all later parameters, are there.
    at = made.compute_seconds
    for layer, index in zip(made.layers, range(len(ready)), strict=True):
        assert at >= max(ready[index:]) - 1e-9
        at -= layer.backward_seconds


# -- candidates -------------------------------------------------------------------------------------------------------


def test_buckets_that_are_better_sent_whole_are_routed_so() -> None:
    """The last layers' messages are hidden by the backward pass that follows, the first layer's are not."""
    model = flat("m", [[(1000, 1000)]] * 8, 0.8, "made up")
    named = replace(model, specs=tuple(specs_of(*model.shapes)))
    setting = Setting(named, 4, made_up_link(1.3e8, 4), CPU.times(20), 4_000_000)
    found = options(setting, [rp.Dense(), rp.IWP(0.01)])
    mixed = found[1]
    assert 0 < mixed.dense < mixed.packed == 8
    assert isinstance(mixed.policy.routing, Named)
    packed = [spec.name for spec in named.specs if mixed.policy.routing.packed(spec)]
    assert packed == [f"p{i}" for i in range(8 - mixed.dense)], "the first layers, whose gradients come last"
    again = predict(setting, mixed.policy)
    assert again.seconds == pytest.approx(mixed.prediction.seconds, rel=1e-9), "as it will be exchanged"
    assert mixed.prediction.seconds < predict(setting, rp.IWP(0.01)).seconds


def test_buckets_are_sent_whole_only_where_that_is_faster_by_enough() -> None:
    """Of VGG-19 at 5 Gbit/s three of eight were, for nothing by what was predicted: it took 11 % longer."""
    model = flat("m", [[(1000, 1000)]] * 8, 0.8, "made up")
    named = replace(model, specs=tuple(specs_of(*model.shapes)))
    found = {False: 0, True: 0}
    for rate in torch.logspace(7.5, 9.5, 60).tolist():
        setting = Setting(named, 4, made_up_link(rate, 4), CPU.times(20), 4_000_000)
        mixture, whole = mix(setting, rp.IWP(0.01)), predict(setting, rp.IWP(0.01))
        if 0 < mixture.dense < mixture.packed and mixture.prediction.seconds < whole.seconds:
            pays = mixture.prediction.seconds < whole.seconds / (1 + MIXED)
            option = options(setting, [rp.IWP(0.01)])[0]
            assert option.dense == (mixture.dense if pays else 0)
            assert option.prediction == (mixture.prediction if pays else whole)
            found[pays] += 1
    assert min(found.values()) > 0, "both were met"


def test_a_candidate_in_use_is_predicted_as_it_is_exchanged() -> None:
    model = flat("m", [[(1000, 1000)]] * 8, 0.8, "made up")
    named = replace(model, specs=tuple(specs_of(*model.shapes)))
    setting = Setting(named, 4, made_up_link(1.3e8, 4), CPU.times(20), 4_000_000)
    found = options(setting, [rp.Dense(), rp.IWP(0.01)])[1]
    assert found.dense
    assert as_exchanged(setting, rp.IWP(0.01), found.policy) == found
    assert as_exchanged(setting, rp.IWP(0.01), rp.IWP(0.01)).dense == 0
    assert as_exchanged(setting, rp.Dense(), rp.Dense()) == options(setting, [rp.Dense()])[0]


def test_a_candidate_that_packs_by_name_is_left_as_it_is() -> None:
    """An assertion ended training, in the step in which some of its buckets were found to be better sent whole."""
    model = flat("m", [[(1000, 1000)]] * 8, 0.8, "made up")
    named = replace(model, specs=tuple(specs_of(*model.shapes)))
    setting = Setting(named, 4, made_up_link(1.3e8, 4), CPU.times(20), 4_000_000)
    policy = replace(rp.IWP(0.01), routing=Named(frozenset(f"p{i}" for i in range(8))))
    assert options(setting, [policy])[0].policy == policy


def test_what_ranks_compare_of_names_is_in_one_order() -> None:
    """They were a set, which each process writes in an order of its own: ranks refused each other's policy."""
    policy = replace(rp.IWP(0.01), routing=Named(frozenset(["p2", "p10", "p1"])))
    assert "names=('p1', 'p10', 'p2')" in str(policy)
    assert policy == replace(rp.IWP(0.01), routing=Named(["p10", "p2", "p1"]))
    assert hash(policy)


def test_nothing_packed_is_no_candidate_of_its_own() -> None:
    model = flat("m", [[(1000, 1000)]] * 3, 0.8, "made up")
    setting = Setting(model, 4, made_up_link(1e12, 4), CPU, 4_000_000)
    option = options(setting, [rp.Dense(), rp.IWP(0.01)])[1]
    assert option.policy == rp.IWP(0.01)
    assert option.dense == 0


def test_the_sentence_says_what_was_measured_predicted_and_chosen() -> None:
    model = flat("m", [[(1000, 1000)]] * 8, 0.8, "made up")
    link = made_up_link(1.25e8 / 1.75, 8)
    setting = Setting(model, 8, link, CPU, 4_000_000)
    found = options(setting, [rp.Dense(), rp.IWP(0.01, values="bf16")])
    text = sentence(found, NAMES, 1, {0: 1.0, 1: 0.9}, link, 8_000_000)
    assert text.startswith("link 1 Gbit/s x 8, 8,000,000 entries: IWP 1 % bf16")
    assert "against" in text
    assert text.endswith("timed: dense 1,000 ms, IWP 1 % bf16 900 ms")
    dense = sentence(found, NAMES, 0, {0: 1.0}, link, 8_000_000)
    assert "dense, nothing else is faster by enough; predicted: dense" in dense
