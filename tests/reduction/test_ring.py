"""The ring on simulated ranks; its laws stand in checks.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune.comm import Communicator, simulate
from ringprune.errors import CommunicatorError
from ringprune.reduction import ring as module
from ringprune.reduction.choice import RingChoice, _decide, _Timing, choose_ring
from ringprune.reduction.ring import RingReduction, chunk_counts
from ringprune.wire.values import VALUE_FORMATS, ValueCode, value_code
from tests.reduction.checks import CHECKS, Check, assert_conserved


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_simulated(check: Check, size: int) -> None:
    simulate(size, check, timeout=20)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(0, 5000),
    st.sampled_from(VALUE_FORMATS),
    st.sampled_from([256, 512]),
    st.integers(1, 6),
)
def test_any_ring_conserves(size: int, numel: int, name: str, chunk: int, in_flight: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_VALUES", chunk)
        patch.setattr(module, "IN_FLIGHT", in_flight)
        simulate(size, lambda comm: assert_conserved(comm, name, numel), timeout=20)


@given(st.integers(0, 10**7), st.integers(1, 300))
def test_chunks_cover_a_region_evenly(numel: int, size: int) -> None:
    """No value is left out, fewer than P are padding; blocks of value codes are cut at a chunk's end only once."""
    counts = chunk_counts(numel, size)
    assert 0 <= size * sum(counts) - numel < size
    assert all(0 < count <= module.CHUNK_VALUES for count in counts)
    assert all(count % 256 == 0 for count in counts[:-1])


def test_several_shifts_are_under_way_at_once() -> None:
    """Before anything is waited for, as many as may be."""

    def rank(comm: Communicator) -> int:
        shifts = 0
        original = comm.shift

        def counted(*args: torch.Tensor, name: str) -> object:
            nonlocal shifts
            shifts += 1
            return original(*args, name=name)

        comm.shift = counted
        ring = RingReduction(comm, torch.ones(4 * 20 * module.CHUNK_VALUES), None, name="r")
        started = shifts
        ring.drain()
        assert shifts == 2 * 3 * 20
        return started

    assert simulate(4, rank, timeout=20) == [module.IN_FLIGHT] * 4


class Spoiling:
    """A code whose messages from one rank are damaged after they were sealed."""

    def __init__(self, spoils: bool) -> None:
        self.code = value_code("int8") or ValueCode("int8")
        self.spoils = spoils

    def size(self, count: int) -> int:
        return self.code.size(count)

    def encode(self, values: Tensor, rest: Tensor, message: Tensor | None = None) -> Tensor:
        message = self.code.encode(values, rest, message)
        if self.spoils:
            message[-1] ^= 1
            self.spoils = False  # one is enough
        return message

    def decode(self, message: Tensor, into: Tensor, *, add: bool = False, name: str) -> Tensor:
        return self.code.decode(message, into, add=add, name=name)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_damaged_message_raises_on_all_ranks_and_leaves_nobody_waiting(size: int) -> None:
    def rank(comm: Communicator) -> str:
        ring = RingReduction(comm, torch.ones(1000), Spoiling(comm.rank == 1), name="r")
        with pytest.raises(CommunicatorError) as caught:
            ring.wait()
        assert comm.allreduce(torch.ones(1), name="afterwards").wait().item() == size
        return str(caught.value)

    messages = simulate(size, rank, timeout=20)
    assert sum("checksum" in message for message in messages) == 1
    assert all("region 1, chunk 1" in message for message in messages)


def test_one_rank_simulated_ranks_and_horovod_keep_to_the_library() -> None:
    class NoShift:
        kind, size, abilities = "horovod", 2, frozenset({"allreduce"})

    assert "one rank" in simulate(1, lambda comm: choose_ring(comm, 1e9))[0].reason
    assert "simulated" in simulate(2, lambda comm: choose_ring(comm, 1e9))[0].reason
    choice = choose_ring(NoShift(), 1e9)
    assert "cannot shift" in choice.reason and not choice.takes(1 << 40)


def test_nothing_is_measured_on_the_host_for_values_on_a_gpu() -> None:
    """Over NCCL alone it ended the first step: Gloo's tensors, of which such a group carries none, were to be timed."""

    class Torch:
        kind, size, abilities = "torch", 2, frozenset({"allreduce", "shift"})

    choice = choose_ring(Torch(), 1e9, torch.device("cuda"))
    assert "values on cuda" in choice.reason and not choice.takes(1 << 40)


def choices(*pairs: tuple[float, float]) -> RingChoice:
    """What is decided where ring and library take so long, in ms, for 100, 200, ... bytes."""
    return _decide([_Timing(100 * (i + 1), ring, library) for i, (ring, library) in enumerate(pairs)])


def test_the_ring_is_used_from_where_it_gains() -> None:
    assert choices((1, 2), (2, 4)).from_bytes == 100
    assert choices((1, 1), (2, 2)).takes(10**9) is False
    assert choices((1, 1), (1.9, 2)).from_bytes > 10**9, "5 % are not worth it"
    # 0.95 * 1 - 1.95 = -1 at 100 bytes, 0.95 * 4 - 2.8 = 1 at 200: half way.
    assert choices((1.95, 1), (2.8, 4)).from_bytes == pytest.approx(150, abs=1)
    assert choices((1, 2), (3, 2), (3, 4)).from_bytes > 200, "a gain that is lost again does not count"


@pytest.mark.parametrize("size", [5, 6, 8])
def test_every_short_length_can_be_summed(size: int) -> None:
    """Regions behind the last value are empty: 11 values on 5 ranks left a chunk that began beyond the end."""

    def rank(comm: Communicator) -> None:
        for numel in range(45):
            values = torch.full((numel,), float(comm.rank))
            total = RingReduction(comm, values, None, name=f"{numel} values").wait()
            assert total.tolist() == [size * (size - 1) / 2] * numel

    simulate(size, rank)
