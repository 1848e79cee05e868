"""Dividing passes among layers: nothing is lost, and the moments that an exchange depends on are kept."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprune.profiles.timeline import Kind, Mark, divide

LAYERS = "abcd"
NO_LAYERS = "xy"


def named(what: str) -> str | None:
    return what if what in LAYERS else None


def marks(*spoken: tuple[Kind, str | None, float]) -> list[Mark]:
    return [Mark(*one) for one in spoken]


def calls(depth: int) -> st.SearchStrategy[list[tuple[Kind, str]]]:
    """A module's call and those inside it."""
    inner = st.lists(calls(depth - 1), max_size=3) if depth else st.just([])
    return st.builds(
        lambda name, inside: [(Kind.ENTER, name), *(one for call in inside for one in call), (Kind.LEAVE, name)],
        st.sampled_from(LAYERS + NO_LAYERS),
        inner,
    )


@st.composite
def one_pass(draw: st.DrawFn) -> list[tuple[Kind, str | None]]:
    forward = [one for call in draw(st.lists(calls(2), min_size=1, max_size=3)) for one in call]
    ready = [(Kind.READY, name) for name in draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5))]
    if not any(name in LAYERS for _, name in forward):
        forward.append((Kind.ENTER, "a"))
    return [*forward, (Kind.BACKWARD, None), *ready, (Kind.DONE, None)]


@given(st.lists(one_pass(), min_size=1, max_size=3), st.data())
def test_layers_add_up_to_the_passes(passes: list[list[tuple[Kind, str | None]]], data: st.DataObject) -> None:
    order = [one for each in passes for one in each]
    gaps = data.draw(st.lists(st.integers(0, 1000), min_size=len(order), max_size=len(order)))
    timed = marks(*((kind, what, when) for (kind, what), when in zip(order, accumulate(gaps), strict=True)))
    forward = backward = 0.0
    start = 0
    for each in passes:
        begin, middle, end = start, start + each.index((Kind.BACKWARD, None)), start + len(each) - 1
        forward += timed[middle].when - timed[begin].when
        backward += timed[end].when - timed[middle].when
        start += len(each)
    times = divide(timed, named)
    assert math.fsum(times.forward.values()) == forward
    assert math.fsum(times.backward.values()) == backward


@given(st.lists(st.integers(0, 1000), min_size=10, max_size=10))
def test_moments_of_an_exchange_are_kept(gaps: list[int]) -> None:
    """When a layer is called, and when its gradients are there, is what the layers before it add up to."""
    order = [(Kind.ENTER, name) for name in LAYERS] + [(Kind.BACKWARD, None)]
    order += [(Kind.READY, name) for name in reversed(LAYERS)] + [(Kind.DONE, None)]
    when = list(accumulate(gaps))
    times = divide(marks(*((*one, moment) for one, moment in zip(order, when, strict=True))), named)
    for number, name in enumerate(LAYERS):
        assert sum(times.forward[before] for before in LAYERS[:number]) == when[number] - when[0]
        if name != LAYERS[0]:  # the first has what is left, too
            there = when[4 + len(LAYERS) - number]
            assert sum(times.backward[later] for later in LAYERS[number:]) == there - when[4]


def test_what_runs_outside_of_layers_is_the_layers_around_it_or_before_it() -> None:
    times = divide(
        marks(
            (Kind.ENTER, "x", 0),
            (Kind.ENTER, "y", 1),
            (Kind.LEAVE, "y", 2),
            (Kind.ENTER, "a", 4),
            (Kind.LEAVE, "a", 8),
            (Kind.ENTER, "b", 16),
            (Kind.ENTER, "c", 32),
            (Kind.LEAVE, "c", 64),
            (Kind.LEAVE, "b", 128),
            (Kind.LEAVE, "x", 256),
            (Kind.BACKWARD, None, 512),
            (Kind.DONE, None, 1024),
        ),
        named,
    )
    assert times.forward == {"a": 16, "b": 16 + 64 + 384, "c": 32}
    assert times.backward == {"b": 512}  # no gradient was there: the last layer's


def test_time_between_passes_is_nobodys() -> None:
    one = [(Kind.ENTER, "a", 0), (Kind.LEAVE, "a", 1), (Kind.BACKWARD, None, 2), (Kind.READY, "a", 3)]
    one.append((Kind.DONE, None, 4))
    late = [(kind, what, when + 1000) for kind, what, when in one]
    times = divide(marks(*one, *late), named)
    assert (times.forward, times.backward) == ({"a": 4}, {"a": 4})


def test_a_layer_whose_forward_pass_was_not_seen_has_its_backward_pass() -> None:
    times = divide(marks((Kind.BACKWARD, None, 1), (Kind.READY, "a", 3), (Kind.DONE, None, 7)), named)
    assert (times.forward, times.backward) == ({}, {"a": 6})


def test_nothing_seen_is_nothing_spent() -> None:
    assert divide([], named) == ({}, {})


@pytest.mark.parametrize("kind", [Kind.LEAVE, Kind.READY, Kind.DONE])
def test_marks_that_open_nothing_cost_nothing(kind: Kind) -> None:
    assert divide(marks((kind, "a", 0.0), (kind, "a", 5.0)), named) == ({}, {})
