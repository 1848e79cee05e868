"""The number of partitions: Parallax's model (papers.md: t(n) = b/n + a (n - 1) + c) and its search."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringprune as rp
from ringprune.sharding import PartitionCost, fit, search

COSTS = st.builds(PartitionCost, st.floats(1e-3, 1.0), st.floats(1e-3, 100.0), st.floats(0.0, 10.0))


@given(COSTS, st.sets(st.integers(1, 64), min_size=3, max_size=8))
def test_the_fit_finds_the_model_that_times_were_made_with(cost: PartitionCost, numbers: set[int]) -> None:
    found = fit({n: cost.seconds(n) for n in sorted(numbers)})
    for n in numbers:
        assert found.seconds(n) == pytest.approx(cost.seconds(n), rel=1e-6)


@given(COSTS)
def test_the_best_number_is_the_root_of_b_over_a(cost: PartitionCost) -> None:
    root = math.sqrt(cost.b / cost.a)
    best = cost.best(range(1, 10_000))
    assert cost.seconds(best) <= min(cost.seconds(max(1, math.floor(root))), cost.seconds(max(1, math.ceil(root))))


@given(COSTS, st.integers(1, 16))
def test_the_search_finds_the_best_of_what_it_has_tried(cost: PartitionCost, start: int) -> None:
    """Others would not come out even: with 6 partitions on 4 ranks two of them owned a third of the rows each."""
    found = search(cost.seconds, start, 64)
    assert {start, found.best} <= set(found.seconds)
    assert cost.seconds(found.best) <= min(found.seconds.values()) * (1 + 1e-9)


def test_it_doubles_while_that_helps_and_stops_at_the_first_number_that_does_not() -> None:
    found = search({2: 5.0, 4: 3.0, 8: 2.0, 16: 4.0}.__getitem__, 2, 64)
    assert list(found.seconds) == [2, 4, 8, 16]
    assert found.cost is not None


def test_it_halves_where_the_first_doubling_does_not_help() -> None:
    found = search({8: 3.0, 16: 4.0, 4: 2.0, 2: 1.0, 1: 1.5}.__getitem__, 8, 64)
    assert list(found.seconds) == [8, 16, 4, 2, 1]


def test_with_too_few_measurements_the_fastest_is_taken() -> None:
    found = search({1: 2.0, 2: 1.0}.__getitem__, 1, 2)
    assert (found.best, found.cost) == (2, None)


def test_all_ranks_find_the_same() -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[int, tuple[float, ...]]:
        found = rp.search_partitions(
            50, 4, torch.arange(10 * comm.rank), comm=comm, repetitions=2
        )  # rank 0 looks nothing up
        assert all(part._closed for part in comm._divided)
        return found.best, tuple(found.seconds.values())

    first, *others = rp.simulate(3, rank, timeout=60)
    assert all(other == first for other in others)
    assert 1 <= first[0] <= 12


@pytest.mark.parametrize(("rows", "repetitions", "said"), [("20", 2, "num_embeddings='20'"), (20, 0, "repetitions=0")])
def test_arguments_that_cannot_work_are_refused(rows: Any, repetitions: int, said: str) -> None:
    with pytest.raises((rp.ConfigurationError, rp.ArgumentTypeError), match=said):
        rp.simulate(
            2, lambda comm: rp.search_partitions(rows, 4, torch.tensor([1]), comm=comm, repetitions=repetitions)
        )
