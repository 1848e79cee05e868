"""Sums of coded values: the same on every rank, nothing lost, and the bytes of the formula."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune.reduction import Mean
from ringprune.reduction.coded import CodedReduction
from ringprune.wire import ValueCode, value_code
from tests.wire.test_values import CODINGS, code_named


def values_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def rounding(had: Tensor) -> Tensor:
    """Coding is exact with its rest; of the ranks - 1 additions in float32 each rounds by 2^-24 of a partial sum."""
    return len(had) * 2.0**-24 * 2 * had.abs().sum(0)


@pytest.mark.parametrize("coding", CODINGS)
@settings(max_examples=20)
@given(ranks=st.integers(1, 5), count=st.one_of(st.integers(0, 12), st.sampled_from([255, 1030])))
def test_what_all_get_and_what_all_keep_is_what_all_had(coding: str, ranks: int, count: int) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor, float]:
        reduction = CodedReduction(comm, values_of(comm.rank, count), code_named(coding), name="x")
        total = reduction.wait()
        return total, reduction.rest, comm.traffic.bytes_sent

    results = rp.simulate(ranks, rank)
    totals, rests, sent = zip(*results, strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals)
    had = torch.stack([values_of(r, count).double() for r in range(ranks)])
    kept = torch.stack([rest.double() for rest in rests])
    assert bool(((totals[0].double() + kept.sum(0) - had.sum(0)).abs() <= rounding(had)).all())

    regions = [count * (r + 1) // ranks - count * r // ranks for r in range(ranks)]
    size = sum(code_named(coding).size(n) for n in regions)
    assert sum(sent) == pytest.approx(2 * (ranks - 1) * size)


def test_a_rank_adds_to_its_own_values_those_of_the_others_in_their_order() -> None:
    """The large ones cancel where they meet first, and swallow the one otherwise; all are bfloat16."""
    orders = list(itertools.permutations([2.0**30, -(2.0**30), 1.0]))

    def rank(comm: rp.comm.Communicator) -> list[float]:
        values = torch.tensor([order[comm.rank] for _ in range(3) for order in orders])
        return CodedReduction(comm, values, code_named("bf16"), name="x").wait().tolist()

    def added(first: float, second: float, third: float) -> float:
        return float(np.float32(first) + np.float32(second) + np.float32(third))

    expected = [added(order[own], *(order[r] for r in range(3) if r != own)) for own in range(3) for order in orders]
    assert {0.0, 1.0} == set(expected) and rp.simulate(3, rank) == [expected] * 3


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("coding", [None, *CODINGS])
@settings(max_examples=10)
@given(ranks=st.integers(1, 4), count=st.one_of(st.integers(0, 12), st.sampled_from([255, 5000])))
def test_in_parts_with_rests_where_the_values_were_all_bits_are_the_same(
    coding: str | None, ring: bool, ranks: int, count: int
) -> None:
    code = None if coding is None else code_named(coding)

    def rank(comm: rp.comm.Communicator) -> None:
        values = values_of(comm.rank, count)
        apart = Mean(predivide=2.0).start(comm, values.clone(), code, ring=ring, name="apart")
        sums, factor = apart.wait_for_sum()
        within = Mean(predivide=2.0).start(comm, values, code, ring=ring, room=values, name="within")
        parts, the_same = within.parts_of_sum()
        joined = torch.full_like(sums, torch.nan)
        for begin, part in parts:
            joined[begin : begin + part.numel()] = part
        values = values_of(comm.rank, count)
        at_once = Mean(predivide=2.0).start(comm, values, code, ring=ring, room=values, name="at once")
        assert the_same == factor and torch.equal(joined, sums) and torch.equal(at_once.wait_for_sum()[0], sums)
        rest = apart.rest
        for other in (within.rest, at_once.rest):
            assert (rest is None) == (other is None)
            assert rest is None or other is None or torch.equal(other, rest)

    rp.simulate(ranks, rank)


class Noting:
    """A code that tells when it works."""

    def __init__(self, done: list[str]) -> None:
        self._done, self._code = done, code_named("bf16")
        self.size = self._code.size

    def encode(self, *args: Any) -> Tensor:
        self._done.append("coded")
        return self._code.encode(*args)

    def decode(self, *args: Any, **options: Any) -> Tensor:
        self._done.append("coded")
        return self._code.decode(*args, **options)


def test_messages_under_way_go_on_between_any_two_regions_that_are_coded() -> None:
    """Over MPI they stood still while a bucket was coded and summed."""

    def rank(comm: rp.comm.Communicator) -> list[str]:
        done: list[str] = []
        comm.progress = lambda: done.append("progress")
        for _ in CodedReduction(comm, values_of(comm.rank, 3000), Noting(done), name="x").parts():
            done.append("written")
        return done

    sent, summed, received = ["coded", "progress"], ["coded", "progress"], ["coded", "written", "progress"]
    assert rp.simulate(3, rank) == [2 * sent + 2 * summed + ["coded"] + 3 * received] * 3


@pytest.mark.parametrize("mean", [Mean(), Mean(average=False), Mean(predivide=4.0)])
def test_rests_are_in_the_units_of_the_values(mean: Mean) -> None:
    def rank(comm: rp.comm.Communicator) -> tuple[Tensor, Tensor]:
        average = mean.start(comm, values_of(comm.rank, 1000), value_code("int4"), name="x")
        result, rest = average.wait(), average.rest
        assert rest is not None
        return result, rest

    results, rests = zip(*rp.simulate(3, rank), strict=True)
    had, kept = torch.stack([values_of(r, 1000).double() for r in range(3)]), torch.stack(rests).double()
    total = results[0].double() * (3 if mean.average else 1)
    # The factor of an average is rounded, and so is what it gives.
    bound = rounding(had) + 2 * 2.0**-24 * total.abs() * mean.average
    assert bool(((total + kept.sum(0) - had.sum(0)).abs() <= bound).all())


def test_a_code_that_is_not_shorter_is_not_used() -> None:
    """Five values of int8 would take a frame and a scale: the plain sum has no rest."""

    def rank(comm: rp.comm.Communicator) -> object:
        average = Mean().start(comm, torch.ones(5), value_code("int8"), name="x")
        average.wait()
        return average.rest

    assert rp.simulate(2, rank) == [None, None]


def test_a_damaged_message_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank sees it at first; it used to leave the others waiting for the sum."""
    encode = ValueCode.encode

    def damaged(code: ValueCode, values: Tensor, rest: Tensor, message: Tensor | None = None) -> Tensor:
        message = encode(code, values, rest, message)
        if values.numel() and float(values[0]) == 7.0:
            message[-1] ^= 1
        return message

    monkeypatch.setattr(ValueCode, "encode", damaged)

    def rank(comm: rp.comm.Communicator) -> str:
        values = torch.ones(300)
        values[0] = 7.0 if comm.rank == 1 else 1.0  # the first of what goes to rank 0
        reduction = CodedReduction(comm, values, code_named("int8"), name="x")
        with pytest.raises(rp.CommunicatorError) as caught:
            reduction.wait()
        return str(caught.value)

    messages = rp.simulate(3, rank)
    assert "x from rank 1" in messages[0] and all("sum of x from rank 0" in message for message in messages[1:])
