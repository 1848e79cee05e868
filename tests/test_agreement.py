"""From proposals to one index set: what a set of Python makes of them, whatever they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.agreement import SPARSE, union

CPU = torch.device("cpu")
# Around the words of a bit map, close together and far apart: both ways to make a set are taken.
INDICES = st.one_of(st.integers(0, 300), st.integers(0, 40 * SPARSE), st.sampled_from([0, 63, 64, 127, 128]))
PROPOSAL = st.sets(INDICES, max_size=200).map(sorted)


@given(st.lists(PROPOSAL, max_size=6))
def test_it_holds_what_any_of_them_does_in_order_and_once(proposals: list[list[int]]) -> None:
    made = union([torch.tensor(each, dtype=torch.int32) for each in proposals], CPU)
    assert made.dtype == torch.int32
    assert made.tolist() == sorted(set().union(*proposals))


@pytest.mark.parametrize("apart", [1, 3, SPARSE // 2, 2 * SPARSE])
def test_dense_and_sparse_proposals_of_many_are_alike(apart: int) -> None:
    sets = [torch.arange(rank, 5000 + rank, dtype=torch.int32) * apart for rank in range(4)]
    assert torch.equal(union(sets, CPU), torch.unique(torch.cat(sets)))


def test_one_proposal_is_the_set() -> None:
    only = torch.tensor([3, 9], dtype=torch.int32)
    assert union([only], CPU) is only
    assert union([], CPU).numel() == 0
