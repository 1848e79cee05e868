"""Every row has one owner, and one place there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringprune as rp
from ringprune.sharding import Owners


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
def test_every_row_has_one_place(rows: int, partitions: int, ranks: int) -> None:
    owners = Owners(rows, min(partitions, rows), ranks)
    everything = torch.arange(rows)
    rank_of, position_of = owners.rank_of(everything), owners.position_of(everything)
    for rank in range(ranks):
        own = owners.rows_of(rank)
        assert len(own) == owners.count_of(rank)
        assert bool((rank_of[own] == rank).all())
        assert position_of[own].tolist() == list(range(len(own)))
    assert sum(owners.count_of(rank) for rank in range(ranks)) == rows


@given(st.integers(1, 200), st.integers(1, 9))
def test_one_partition_per_rank_gives_each_its_share(rows: int, ranks: int) -> None:
    counts = [Owners(rows, min(ranks, rows), ranks).count_of(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("partitions", [0, 11])
def test_partitions_that_cannot_be_are_refused(partitions: int) -> None:
    with pytest.raises(rp.ConfigurationError, match=r"partitions=.*from 1 to the number of rows, 10"):
        Owners(10, partitions, 2)
