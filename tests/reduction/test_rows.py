"""Rows summed by owners or gathered, and the rule that takes the cheapest way."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune.comm import Communicator, simulate
from ringprune.comm.waiting import FinishedHandle
from ringprune.errors import CommunicatorError
from ringprune.reduction import GatheredRows, OwnedRows, RowSets, spread, sum_rows
from ringprune.routing import WAYS, cheapest, expected_union, way_costs
from ringprune.wire import ValueCode, value_code
from tests.tables import EPS, within

Contribution = tuple[Tensor, Tensor]
CODES = (None, value_code("fp16"), value_code("bf16"))


@st.composite
def contributions(draw: st.DrawFn) -> tuple[list[Contribution], int]:
    """One to five ranks' rows: disjoint, equal, overlapping, none or all."""
    size, length, width = draw(st.integers(1, 5)), draw(st.integers(1, 150)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ranks = []
    for rank in range(size):
        chosen = draw(st.sampled_from(["none", "all", "some", "first", "own"]))
        some = {"none": [], "all": range(length), "first": range(min(length, 7)), "own": range(rank, length, size)}
        rows = some[chosen] if chosen in some else sorted(draw(st.sets(st.integers(0, length - 1))))
        ranks.append((torch.tensor(list(rows), dtype=torch.int64), torch.randn(len(rows), width, generator=generator)))
    return ranks, length


def owned(comm: Communicator, own: Contribution, length: int, code: ValueCode | None = None) -> Contribution:
    under_way = OwnedRows(comm, *own, length, code, name="rows")
    under_way.push_sets()
    under_way.push_values()
    under_way.tell()
    under_way.gather_sets()
    under_way.gather_values()
    return under_way.wait()


def gathered(comm: Communicator, own: Contribution, length: int, code: ValueCode | None = None) -> Contribution:
    counts = comm.allgather(torch.tensor([len(own[0])]), name="counts").wait().tolist()
    sets = RowSets(comm, own[0], counts, [length] * comm.size, name="sets")
    values = GatheredRows(comm, own[1], counts, code, name="values")
    return sum_rows(sets.wait(), values.wait(), own[1])


def reference(ranks: Sequence[Contribution], length: int) -> tuple[Tensor, Tensor, Tensor]:
    tables = [spread(rows, values.double(), length) for rows, values in ranks]
    union = torch.tensor(sorted(set(torch.cat([rows for rows, _ in ranks]).tolist())), dtype=torch.int64)
    total, magnitude = torch.stack(tables).sum(0), torch.stack(tables).abs().sum(0)
    return union, total[union], magnitude[union]


@settings(deadline=None, max_examples=60)
@given(contributions(), st.sampled_from([owned, gathered]))
def test_sums_are_those_of_float64_at_all_ranks_rows(case: tuple[list[Contribution], int], way: Any) -> None:
    """P terms, so P-1 roundings; the same bytes everywhere."""
    ranks, length = case
    results = simulate(len(ranks), lambda comm: way(comm, ranks[comm.rank], length), timeout=20)
    union, total, magnitude = reference(ranks, length)
    for rows, sums in results:
        assert torch.equal(rows, union)
        assert within(sums, total, magnitude, len(ranks) - 1)
        assert torch.equal(sums, results[0][1])


@settings(deadline=None, max_examples=40)
@given(contributions(), st.sampled_from([owned, gathered]), st.sampled_from(CODES[1:]))
def test_coded_values_are_rounded_at_most_twice(
    case: tuple[list[Contribution], int], way: Any, code: ValueCode
) -> None:
    """Where they come from, by half a unit in the last place of their format, and as a sum; the same bytes everywhere.

    fp16's scale keeps all but what is below 2^-24 of the largest of a message out of its denormals.
    """
    ranks, length = case
    results = simulate(len(ranks), lambda comm: way(comm, ranks[comm.rank], length, code), timeout=20)
    union, total, magnitude = reference(ranks, length)
    unit = 2.0**-8 if code.coding == "bf16" else 2.0**-11
    largest = float(magnitude.max()) if magnitude.numel() else 0.0
    for rows, sums in results:
        assert torch.equal(rows, union)
        bound = (2 * unit + unit * unit + len(ranks) * EPS) * magnitude + (len(ranks) + 1) * 2.0**-24 * largest
        assert bool(((sums.double() - total).abs() <= bound).all())
        assert torch.equal(sums, results[0][1])


class Damaging:
    """A communicator whose rank 1 gets other bytes than were sent."""

    def __init__(self, comm: Communicator, call: str) -> None:
        self._comm, self._call = comm, call

    def __getattr__(self, name: str) -> Any:
        if name != self._call or self._comm.rank != 1:
            return getattr(self._comm, name)

        def damaged(tensor: Tensor, **sizes: Any) -> Any:
            result = getattr(self._comm, name)(tensor, **sizes).wait()
            if sizes["name"].endswith("numbers of rows") or result.dtype == torch.uint8:
                result = torch.full_like(result, 77)
            return FinishedHandle(result)

        return damaged


@pytest.mark.parametrize("code", CODES[:2], ids=["numbers", "coded values"])
def test_what_one_owner_got_damaged_raises_on_all_ranks(code: ValueCode | None) -> None:
    own = torch.arange(8), torch.ones(8, 2)

    def rank(comm: Communicator) -> None:
        with pytest.raises(CommunicatorError):
            owned(Damaging(comm, "alltoall"), own, 20, code)

    simulate(3, rank, timeout=20)


# -- the rule ---------------------------------------------------------------------------------------------------------

counts_of = st.integers(1, 400).flatmap(
    lambda length: st.tuples(st.just(length), st.lists(st.integers(0, length), min_size=1, max_size=9))
)


@given(counts_of, st.integers(1, 400), st.integers(1, 2000))
def test_the_expected_union_can_be(case: tuple[int, list[int]], union: int, total: int) -> None:
    length, counts = case
    for last in ((0, 0), (min(union, total), total)):
        expected = expected_union(counts, length, last)
        assert max(counts) <= expected <= min(length, sum(counts))


def test_the_expected_union_is_that_of_random_sets_or_of_the_step_before() -> None:
    size, length, count = 4, 2000, 600
    draws = [torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count] for seed in range(size)]
    drawn = torch.cat(draws).unique().numel()
    # Each row is in the union or not, with a variance of at most 1/4; rows of one draw exclude each other.
    assert abs(expected_union([count] * size, length) - drawn) < 4 * (length / 4) ** 0.5
    assert expected_union([10, 30], 2000, (60, 80)) == 30
    assert expected_union([10, 40], 2000, (60, 80)) == 40  # a rank has as many by itself


@given(counts_of, st.sampled_from([4, 8, 64, 512]), st.floats(0, 1))
def test_the_cheapest_way_is_the_cheapest(case: tuple[int, list[int]], row_bytes: int, share: float) -> None:
    length, counts = case
    low, high = max(counts), min(length, sum(counts))
    costs = way_costs(counts, length, row_bytes, low + share * (high - low))
    assert list(costs) == list(WAYS)
    assert costs[cheapest(costs)] == min(costs.values())


@given(counts_of, st.sampled_from([4, 8, 64, 512]), st.floats(0, 1))
def test_owners_are_dearer_than_the_union_by_no_more_than_the_numbers_they_tell(
    case: tuple[int, list[int]], row_bytes: int, share: float
) -> None:
    """With rows of 4 bytes or more, on two ranks or more: so by bytes the union, and the table, hardly ever win."""
    length, counts = case
    if len(counts) < 2:
        return
    low, high = max(counts), min(length, sum(counts))
    costs = way_costs(counts, length, row_bytes, low + share * (high - low))
    assert costs["owners"] <= (costs["union"] + 8 * len(counts)) * (1 + 1e-12)
    assert costs["union"] <= costs["dense"]
