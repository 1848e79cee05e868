"""Collectives are measured as they are: the points lie where messages were made to, and all ranks get the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune.prediction import MeasuredLink
from ringprune.prediction.link import Kind
from ringprune.probing.collectives import LONG_SECONDS, measured_link
from tests.auto.made_up import KINDS


class Clocked:
    """Ranks that are not there, whose collectives take a latency and their bytes, by a clock of its own."""

    def __init__(self, latency: float, rate: float, size: int) -> None:
        self.latency, self.rate, self.size, self.now = latency, rate, size, 0.0

    def clock(self) -> float:
        return self.now

    def _take(self, tensor: Tensor) -> "Clocked":
        self.now += self.latency + tensor.nbytes / self.rate
        self.result = tensor
        return self

    def allreduce(self, tensor: Tensor, *, name: str) -> "Clocked":
        return self._take(tensor)

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> "Clocked":
        return self._take(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> "Clocked":
        self._take(tensor)
        self.result = tensor.repeat(self.size)
        return self

    def alltoall(self, tensor: Tensor, *, name: str) -> "Clocked":
        return self._take(tensor)

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> "Clocked":
        return self._take(tensor)

    def wait(self) -> Tensor:
        return self.result


@given(st.floats(1e-6, 1e-3), st.floats(1e5, 1e11), st.integers(2, 9))
def test_points_lie_on_what_messages_take(latency: float, rate: float, size: int) -> None:
    comm = Clocked(latency, rate, size)
    found = measured_link(comm, KINDS, clock=comm.clock)
    assert set(found.points) == set(KINDS)
    for payload, seconds in found.points["allreduce"]:
        assert seconds == pytest.approx(latency + payload / rate)
    # Between and beyond the points as well: straight lines are what it is made of.
    for payload in (100.0, 3e6, 1e9):
        assert found.seconds("allreduce", payload, size) == pytest.approx(latency + payload / rate, rel=1e-6)
    for points in found.points.values():
        assert len(points) >= 3
        assert all(seconds <= LONG_SECONDS for _, seconds in points[2:-1])


@given(st.integers(1, 1 << 26), st.integers(2, 9))
def test_a_small_model_is_not_measured_with_the_messages_of_a_large_one(most: int, size: int) -> None:
    """Of 19,210 parameters ``auto`` sent 200 MB to find out how to send 77 kB."""
    comm = Clocked(1e-6, 1e12, size)
    found = measured_link(comm, ["allreduce"], clock=comm.clock, most=most)
    longest = max(payload for payload, _ in found.points["allreduce"])
    assert longest <= max(4 * most, 1 << 16)


@pytest.mark.parametrize("size", [2048, 2049, 5000, 100_000])
def test_thousands_of_ranks_are_measured(size: int) -> None:
    """From 2,049 ranks on the two shortest messages were one entry from each, which raised while training went on."""
    comm = Clocked(1e-6, 1e12, size)
    found = measured_link(comm, ["allgather", "alltoall", "ring"] if size < 3000 else ["allgather"], clock=comm.clock)
    assert all(len(points) >= 3 for points in found.points.values())


def test_all_ranks_find_the_same() -> None:
    found = rp.simulate(3, lambda comm: measured_link(comm, ["alltoall", "allgather", "broadcast"]))
    assert found[1:] == found[:-1]
    assert all(seconds > 0 for points in found[0].points.values() for _, seconds in points)


@given(
    st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(1e-6, 1.0)), min_size=2, max_size=6, unique_by=lambda p: p[0]),
    st.floats(0.0, 1e7),
    st.floats(0.0, 1e7),
)
def test_a_longer_message_beyond_the_points_takes_no_less(
    points: list[tuple[float, float]], a: float, b: float
) -> None:
    link = MeasuredLink({"allreduce": tuple(sorted(points))}, 2)
    last = max(points)[0]
    low, high = sorted((last + a, last + b))
    assert 0 <= link.seconds("allreduce", low, 2) <= link.seconds("allreduce", high, 2)
    assert link.seconds("allreduce", low, 1) == 0


@pytest.mark.parametrize("points", [((4.0, 1.0),), ((4.0, 1.0), (4.0, 2.0)), ((8.0, 1.0), (4.0, 2.0))])
def test_points_that_make_no_line_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(rp.ConfigurationError, match="ascending"):
        MeasuredLink({"allreduce": points}, 2)


def test_what_was_not_measured_is_not_known() -> None:
    link = MeasuredLink({"allreduce": ((4.0, 1.0), (8.0, 2.0))}, 2)
    kind: Kind = "alltoall"
    with pytest.raises(rp.ConfigurationError, match="alltoall was not measured on 2 ranks"):
        link.seconds(kind, 4.0, 2)
    with pytest.raises(rp.ConfigurationError, match="on 3 ranks"):
        link.seconds("allreduce", 4.0, 3)
