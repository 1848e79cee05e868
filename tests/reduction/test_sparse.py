"""Sparse sums on simulated ranks, and their kernels; the laws stand in checks.py."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringprune.comm import Communicator, simulate
from ringprune.errors import ArgumentTypeError, CommunicatorError, ConfigurationError, RingPruneError
from ringprune.reduction import merge, sparse
from ringprune.reduction.merge import add_pairs, among, ascending_within, densify, sparsify
from ringprune.reduction.sparse import GatheredReduction, SparseReduction
from tests.reduction.checks import Contribution, assert_sums, reference

KINDS = (SparseReduction, GatheredReduction)


@st.composite
def contributions(draw: st.DrawFn) -> tuple[list[Contribution], int]:
    """One to five ranks' entries: disjoint, equal, overlapping, none or all."""
    size, numel = draw(st.integers(1, 5)), draw(st.integers(0, 60))
    ranks = []
    for rank in range(size):
        chosen = draw(st.sampled_from(["none", "all", "some", "first", "own"]))
        some = {"none": [], "all": range(numel), "first": range(min(numel, 7)), "own": range(rank, numel, size)}
        indices = some[chosen] if chosen in some else sorted(draw(st.sets(st.integers(0, max(0, numel - 1)))))
        kept = [index for index in indices if index < numel]
        values = draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=len(kept), max_size=len(kept)))
        ranks.append((torch.tensor(kept, dtype=torch.int32), torch.tensor(values, dtype=torch.float32)))
    return ranks, numel


@settings(deadline=None, max_examples=100)
@given(contributions())
def test_any_sparse_sum_is_that_of_a_dictionary(case: tuple[list[Contribution], int]) -> None:
    ranks, numel = case
    simulate(len(ranks), lambda comm: assert_sums(comm, ranks, numel), timeout=20)


@settings(deadline=None, max_examples=60)
@given(contributions())
def test_sparse_sums_conserve(case: tuple[list[Contribution], int]) -> None:
    """In float64, but for at most P-1 additions in float32 per entry."""
    ranks, numel = case
    total, largest = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for indices, values in ranks:
        total[indices.long()] += values.double()
        largest[indices.long()] += values.double().abs()
    for kind in KINDS:
        indices, values = simulate(
            len(ranks), lambda comm, kind=kind: kind(comm, *ranks[comm.rank], numel, name="s").wait()
        )[0]
        error = total.index_add(0, indices.long(), -values.double()).abs()
        assert bool((error <= (len(ranks) - 1) * 2**-24 * largest + 2**-149).all())


@settings(deadline=None, max_examples=200)
@given(contributions(), st.data())
def test_adding_gives_the_same_bytes_however_it_is_done(
    case: tuple[list[Contribution], int], data: st.DataObject
) -> None:
    """Merged or summed densely, from sparse or dense lists."""
    ranks, numel = case
    lists = [(indices.numpy(), values.numpy()) for indices, values in ranks]
    mixed = [densify(*each, numel) if data.draw(st.booleans()) else each for each in lists]
    expected = reference(ranks)
    for cost in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merge, "SCAN_COST", cost)
            for given_lists in (lists, mixed):
                indices, values = add_pairs(given_lists, numel)
                assert indices.dtype == np.int32 and indices.tolist() == sorted(expected)
                wanted = np.array([expected[index] for index in sorted(expected)], np.float32)
                assert values.tobytes() == wanted.tobytes()


def test_zeros_and_infinities_are_entries() -> None:
    """Only what is absent is left out: 0.0, -0.0 (which becomes 0.0) and what cancels stay."""
    indices = np.arange(5, dtype=np.int32)
    values = np.array([0.0, -0.0, 1.0, np.inf, np.nan], np.float32)
    back = sparsify(densify(indices[:], values, 7))
    assert back[0].tolist() == [0, 1, 2, 3, 4]
    assert not np.signbit(back[1][:2]).any()
    total = add_pairs([(indices, values), (indices, -values)], 7)
    assert total[0].tolist() == [0, 1, 2, 3, 4]
    assert total[1][:3].tolist() == [0.0, 0.0, 0.0] and not np.signbit(total[1][:3]).any()


@pytest.mark.parametrize(
    ("indices", "fine"),
    [([], True), ([0, 4], True), ([0, 5], False), ([-1, 2], False), ([1, 1], False), ([2, 1], False)],
)
def test_damaged_indices_are_found(indices: list[int], fine: bool) -> None:
    assert ascending_within(np.array(indices, np.int32), 5) is fine


BAD: list[tuple[torch.Tensor, torch.Tensor, type[RingPruneError]]] = [
    (torch.tensor([3, 1], dtype=torch.int32), torch.ones(2), ConfigurationError),
    (torch.tensor([100], dtype=torch.int32), torch.ones(1), ConfigurationError),
    (torch.tensor([1], dtype=torch.int32), torch.ones(2), ConfigurationError),
    (torch.tensor([1]), torch.ones(1), ArgumentTypeError),
    (torch.tensor([1], dtype=torch.int32), torch.ones(1).double(), ArgumentTypeError),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("indices", "values", "error"), BAD)
def test_bad_entries_on_one_rank_raise_on_all(
    kind: type[SparseReduction], indices: torch.Tensor, values: torch.Tensor, error: type[RingPruneError]
) -> None:
    def rank(comm: Communicator) -> None:
        fine = torch.tensor([0, 99], dtype=torch.int32), torch.ones(2)
        reduction = kind(comm, *((indices, values) if comm.rank == 1 else fine), 100, name="s")
        with pytest.raises(error if comm.rank == 1 else CommunicatorError, match=r"s: (?!.*rank 0)"):
            reduction.wait()
        with pytest.raises(error if comm.rank == 1 else CommunicatorError):  # it was a bare StopIteration
            reduction.drain()
        assert comm.allreduce(torch.ones(1), name="afterwards").wait().item() == 3

    simulate(3, rank, timeout=20)


def damaged(spoil: Callable[[torch.Tensor, str, int], torch.Tensor], kind: type[SparseReduction]) -> list[str]:
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
        indices = torch.arange(0, 100, 5, dtype=torch.int32)
        with pytest.raises(CommunicatorError) as caught:
            kind(comm, indices, torch.ones(20), 100, name="s").wait()
        return str(caught.value)

    return simulate(3, rank, timeout=20)


@pytest.mark.parametrize("number", [-5, 1000])
@pytest.mark.parametrize(
    ("kind", "what"), [(SparseReduction, "entries"), (SparseReduction, "sums"), (GatheredReduction, "entries")]
)
def test_a_rank_that_tells_nonsense_raises_on_all(kind: type[SparseReduction], what: str, number: int) -> None:
    def spoil(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        return tensor.fill_(number) if name.endswith(f"number of {what}") and rank == 2 else tensor

    assert all(f"rank 2 tells of {number} {what}" in message for message in damaged(spoil, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_arrive_damaged_raise_on_all(kind: type[SparseReduction]) -> None:
    def spoil(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        if name.endswith("pieces") and rank == 2:
            tensor[0] = 10**6
        return tensor

    messages = damaged(spoil, kind)
    if kind is GatheredReduction:
        assert all("came from rank 2 do not ascend" in message for message in messages)
    else:  # the first word of rank 2 goes to rank 0
        assert "came from rank 2 do not ascend" in messages[0]
        assert all("ranks [0] cannot go on" in message for message in messages[1:])


def test_sums_that_arrive_damaged_raise_on_all() -> None:
    def spoil(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        if name.endswith("s: sums") and rank == 1:
            tensor[0] = -7
        return tensor

    assert all("came from rank 1 do not ascend" in message for message in damaged(spoil, SparseReduction))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_which_of_ascending_indices_are_among_others(indices: set[int], others: set[int]) -> None:
    ours, theirs = (np.array(sorted(each), np.int32) for each in (indices, others))
    assert among(ours, theirs).tolist() == [index in others for index in sorted(indices)]


def test_regions_cover_the_range() -> None:
    assert sparse.region_begins(10, 4) == [0, 3, 6, 9, 10]
    assert sparse.region_begins(2, 4) == [0, 1, 2, 2, 2]
    assert sparse.region_begins(0, 3) == [0, 0, 0, 0]
