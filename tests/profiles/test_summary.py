"""Medians of layers add up to the median pass."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprune.profiles.summary import medians

times = st.fixed_dictionaries({}, optional={name: st.floats(0, 1e4) for name in "abc"})


@given(st.lists(times, min_size=1, max_size=8))
def test_medians_add_up(rows: list[dict[str, float]]) -> None:
    found = medians(rows, "abc")
    assert math.fsum(found.values()) == pytest.approx(median(math.fsum(row.values()) for row in rows), rel=1e-9)
    assert all(value >= 0 for value in found.values())


def test_times_next_to_nothing_add_up_too() -> None:
    """One over such a time is infinite; times a layer of no time that once was no number."""
    assert medians([{}, {"c": 1.0}, {"a": 0.0, "c": 2.225e-311, "b": 1.0}], "abc") == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_one_iteration_in_many_that_is_slow_changes_nothing() -> None:
    usual = {"a": 1.0, "b": 3.0}
    assert medians([usual, usual, {"a": 500.0, "b": 3.0}], "ab") == usual


def test_layers_that_take_turns_have_their_means() -> None:
    rows = [{"a": 3.0}, {"b": 3.0}, {"c": 3.0}]
    assert medians(rows, "abc") == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})
