"""A link: bounds that every collective keeps, and figures that follow from the formula."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprune.errors import ConfigurationError
from ringprune.prediction import GOODPUT, Link
from ringprune.prediction.link import Kind

KINDS: list[Kind] = ["allreduce", "broadcast", "allgather", "alltoall", "ring"]

kinds = st.sampled_from(KINDS)
payloads = st.floats(0, 1e10)
sizes = st.integers(1, 500)


@given(kinds, payloads, sizes, st.floats(1, 1e12), st.floats(1, 1e6), st.floats(0, 1))
def test_a_faster_link_is_never_slower(
    kind: Kind, payload: float, ranks: int, rate: float, factor: float, latency: float
) -> None:
    slow, fast = Link(rate, latency), Link(rate * factor, latency)
    assert fast.seconds(kind, payload, ranks) <= slow.seconds(kind, payload, ranks)


@given(kinds, payloads, st.integers(2, 500), st.floats(0, 1))
def test_what_no_link_limits_takes_its_hops(kind: Kind, payload: float, ranks: int, latency: float) -> None:
    seconds = Link(math.inf, latency).seconds(kind, payload, ranks)
    assert math.log2(ranks) * latency <= seconds * (1 + 1e-9)
    assert seconds <= 2 * (ranks - 1) * latency


@given(kinds, payloads)
def test_one_rank_sends_nothing(kind: Kind, payload: float) -> None:
    assert Link(1.0).seconds(kind, payload, 1) == 0


@given(st.floats(1e6, 1e10), st.integers(2, 64))
def test_a_long_sum_takes_what_the_ring_sends(payload: float, ranks: int) -> None:
    """Without latency no algorithm sends less than 2 (P-1)/P of it; with two ranks doubling sends as much."""
    link = Link(1e9, 0.0)
    assert link.seconds("allreduce", payload, ranks) == pytest.approx(2 * (ranks - 1) / ranks * payload / 1e9)


def test_short_messages_take_the_way_of_few_hops() -> None:
    assert Link(1e9, 1e-3).seconds("allreduce", 12, 64) == pytest.approx(6 * (1e-3 + 12 / 1e9))


def test_a_rate_is_payload_and_headers() -> None:
    assert Link.of_rate(8e9).bytes_per_second == pytest.approx(1e9 * GOODPUT)
    assert Link.of_rate(8e9, goodput=0.5).bytes_per_second == pytest.approx(5e8)
    assert Link.of_rate(math.inf).bytes_per_second == math.inf


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1e9, -1e-6), (1e9, math.inf), (math.nan, 0.0)])
def test_links_that_cannot_be(rate: float, latency: float) -> None:
    with pytest.raises(ConfigurationError):
        Link(rate, latency)


@given(st.sampled_from(KINDS), st.floats(1.0, 1e9), st.integers(2, 64), st.floats(0.01, 1.0))
def test_a_kind_that_reaches_a_share_takes_as_long_as_on_a_link_of_that_share(
    kind: Kind, payload: float, ranks: int, share: float
) -> None:
    link = Link(1e9, 1e-4, {kind: share})
    assert link.seconds(kind, payload, ranks) == pytest.approx(Link(share * 1e9, 1e-4).seconds(kind, payload, ranks))
    for other in set(KINDS) - {kind}:
        assert link.seconds(other, payload, ranks) == Link(1e9, 1e-4).seconds(other, payload, ranks)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_shares_that_cannot_be(share: float) -> None:
    with pytest.raises(ConfigurationError, match=r"shares\['allreduce'\]"):
        Link(1e9, 0.0, {"allreduce": share})
