"""The largest sums, on simulated ranks: how entries are dealt, how good the choice is, and what goes wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringprune import ops
from ringprune.comm import Communicator, simulate
from ringprune.errors import CommunicatorError
from ringprune.reduction.balanced import BalancedReduction
from ringprune.reduction.dealt import dealing
from ringprune.wire import pair_code
from tests.reduction.checks import assert_largest, largest
from tests.reduction.test_sparse import BAD, contributions

NUMEL = 100


def reduction(
    comm: Communicator, indices: Tensor, values: Tensor, total: int = 98, numel: int = NUMEL
) -> BalancedReduction:
    dealt = dealing(numel, total, comm.size)
    code = pair_code(dealt.expected, dealt.groups)
    return BalancedReduction(comm, indices, values, dealing=dealt, judge=largest, code=code, name="s")


# -- dealing ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 70), st.integers(0, 100), st.data())
def test_every_entry_is_dealt_to_one_rank(numel: int, size: int, turn: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(0, numel))
    dealt = dealing(numel, total, size, turn)
    parts = dealt.deal(np.arange(numel, dtype=np.int32))
    assert [len(part) for part in parts] == dealt.lengths
    assert sorted(np.concatenate(parts)) == list(range(numel))
    for rank, part in enumerate(parts):
        places = dealt.places(part)
        assert (np.diff(places) > 0).all() and (places < dealt.groups).all()
        assert (dealt.indices(places, rank) == part).all()


@given(st.integers(0, 500), st.integers(1, 70), st.integers(0, 100), st.data())
def test_shares_are_even_and_add_up(numel: int, size: int, turn: int, data: st.DataObject) -> None:
    """Where there is little to keep fewer ranks do, and all of them in turn."""
    total = data.draw(st.integers(0, numel))
    dealt = dealing(numel, total, size, turn)
    assert sum(dealt.shares) == total
    for share, length in zip(dealt.shares, dealt.lengths, strict=True):
        assert abs(share - total * length / max(1, numel)) < 1 and share <= length
    assert sum(length > 0 for length in dealt.lengths) == min(dealt.hands, numel)
    assert dealt.hands in (1, size) or 32 * dealt.hands <= total < 32 * (dealt.hands + 1)
    with_a_hand = {rank for t in range(size) for rank, n in enumerate(dealing(numel, total, size, t).lengths) if n}
    assert with_a_hand == (set(range(size)) if numel else set())


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("pattern", ["first", "rows", "columns", "strided"])
def test_no_pattern_loads_one_rank_more_than_another(size: int, pattern: str) -> None:
    """4,096 entries: each rank's number has the variance of independent draws at most; none is 5 deviations off."""
    indices = {
        "first": np.arange(4096),
        "rows": (np.arange(16)[:, None] * 51_200 + np.arange(256)).reshape(-1),
        "columns": np.arange(4096) * 512,
        "strided": np.arange(4096) * size,
    }[pattern].astype(np.int32)
    counts = np.array([len(mine) for mine in dealing(4_000_000, 4096, size).deal(indices)])
    assert np.abs(counts - 4096 / size).max() < 5 * np.sqrt(4096 / size)


# -- what is kept -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(contributions(), st.data())
def test_the_largest_sums_of_anything(case: tuple[list[tuple[Tensor, Tensor]], int], data: st.DataObject) -> None:
    ranks, numel = case
    total, name = data.draw(st.integers(0, numel)), data.draw(st.sampled_from(["fp32", "bf16", "int8"]))
    simulate(len(ranks), lambda comm: assert_largest(comm, ranks, numel, total, name), timeout=20)


def test_shares_of_a_deal_are_nearly_the_largest_of_all() -> None:
    """Keeping K / P each holds all but a thousandth of the energy of the exact top K of the sums.

    A rank's part of the top K is K / P up to some sqrt(K / P): so many entries are exchanged for ones next to them.
    """
    numel, total, size = 400_000, 4000, 8
    draws = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(size + 1)]
    noisy = [draw + draws[-1] for draw in draws[:-1]]
    proposed = [ops.select(each.abs(), [0, numel], [total]) for each in noisy]
    sums = torch.zeros(numel)
    for each, indices in zip(noisy, proposed, strict=True):
        sums[indices.long()] += each[indices.long()]

    def rank(comm: Communicator) -> Tensor:
        indices = proposed[comm.rank]
        return reduction(comm, indices, noisy[comm.rank][indices.long()], total, numel).wait()[0]

    kept = simulate(size, rank)[0].long()
    best = sums.abs().topk(total).values.square().sum()
    assert sums[kept].square().sum() > 0.999 * best


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("indices", "values", "error"), BAD)
def test_bad_entries_on_one_rank_raise_on_all(indices: Tensor, values: Tensor, error: type[Exception]) -> None:
    def rank(comm: Communicator) -> None:
        fine = torch.tensor([0, 99], dtype=torch.int32), torch.ones(2)
        summing = reduction(comm, *((indices, values) if comm.rank == 1 else fine))
        with pytest.raises(error if comm.rank == 1 else CommunicatorError, match=r"s: (?!.*rank 0)"):
            summing.wait()
        with pytest.raises(error if comm.rank == 1 else CommunicatorError):  # it was a bare StopIteration
            summing.drain()
        assert comm.allreduce(torch.ones(1), name="afterwards").wait().item() == 3

    simulate(3, rank, timeout=20)


def damaged(spoil: Callable[[Tensor, str, int], Tensor]) -> list[str]:
    """What three ranks raise where ``spoil(tensor, name, rank)`` changes what they send."""

    def rank(comm: Communicator) -> str:
        for op in ("allgather", "alltoall"):
            original = getattr(comm, op)
            setattr(
                comm,
                op,
                lambda tensor, *, name, original=original, **sizes: original(
                    spoil(tensor.clone(), name, comm.rank), name=name, **sizes
                ),
            )
        indices = torch.arange(0, NUMEL, 2, dtype=torch.int32)
        with pytest.raises(CommunicatorError) as caught:
            reduction(comm, indices, torch.ones(50)).wait()
        return str(caught.value)

    return simulate(3, rank, timeout=20)


def test_a_piece_that_arrives_damaged_raises_on_all() -> None:
    messages = damaged(lambda t, name, rank: t ^ 1 if name.endswith("pieces") and rank == 2 else t)
    for receiver in (0, 1):
        assert "s: piece from rank 2: it is no message of RingPrune's" in messages[receiver]
    assert "s: sums of rank 0: it is no message of RingPrune's" in messages[2]


def test_sums_that_arrive_damaged_raise_on_all() -> None:
    def spoil(tensor: Tensor, name: str, rank: int) -> Tensor:
        return tensor.roll(1) if name.endswith("largest sums") and rank == 1 else tensor

    assert all("sums of rank 1" in message for message in damaged(spoil))


def test_a_rank_that_tells_nonsense_is_named() -> None:
    def rank(comm: Communicator) -> None:
        alltoall = comm.alltoall
        comm.alltoall = lambda tensor, *, name, **sizes: alltoall(
            tensor.fill_(10**6) if "number" in name and comm.rank == 2 else tensor, name=name, **sizes
        )
        reduction(comm, torch.arange(5, dtype=torch.int32), torch.ones(5)).wait()

    with pytest.raises(CommunicatorError, match="rank 2 tells of 1000000 entries where at most 33 can be"):
        simulate(3, rank, timeout=20)
