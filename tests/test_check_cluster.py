"""What check_cluster warns of, on made-up ranks and links."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from mpi_scripts import check_cluster
from mpi_scripts.cluster_check.findings import find, rate
from mpi_scripts.cluster_check.links import Links, Pair
from mpi_scripts.cluster_check.ranks import Rank

HOSTS = ["a", "b", "c", "d"]


def rank(i: int, host: str, **changes: object) -> Rank:
    versions = {"MPI": "Open MPI v4.1.8"}
    plain = Rank(
        i, host, machine=host, local_rank=0, cores=(0, 1), threads="1", thread_level="multiple", versions=versions
    )
    return replace(plain, **changes)


RANKS = [rank(i, host) for i, host in enumerate(HOSTS)]


def links(slow: dict[tuple[int, int], float] | None = None, ring: float = 1e9) -> Links:
    pairs = {(i, j): Pair(1e9, 2e-5) for i in range(4) for j in range(4) if i != j}
    return Links(pairs | {pair: Pair(bits, 2e-5) for pair, bits in (slow or {}).items()}, [ring] * 4)


def test_nothing_is_wrong() -> None:
    assert find(RANKS, HOSTS, links()) == []
    assert find(RANKS[:1], HOSTS[:1], Links({}, [])) == []


def test_a_slow_link_is_named() -> None:
    expected = "the link b -> c is slow: 200.0 Mbit/s, the median link has 1.00 Gbit/s"
    assert find(RANKS, HOSTS, links({(1, 2): 2e8}, ring=2e8)) == [expected]


@pytest.mark.parametrize(("side", "says"), [(0, "c sends slowly"), (1, "c receives slowly")])
def test_a_slow_host_is_named_once(side: int, says: str) -> None:
    slow = {pair: 2e8 for pair in links().pairs if pair[side] == 2}
    (warning,) = find(RANKS, HOSTS, links(slow, ring=2e8))
    assert warning.startswith(says)


def test_a_late_link_and_a_crowded_switch() -> None:
    late = replace(links(ring=3e8), pairs=links().pairs | {(0, 3): Pair(1e9, 9e-4)})
    first, second = find(RANKS, HOSTS, late)
    assert "a -> d is late: 900 us" in first
    assert "with all sending at once a link does 300.0 Mbit/s, alone 1.00 Gbit/s" in second


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([rank(0, "a"), rank(1, "a", local_rank=1)], "all 2 ranks are on one host, a"),
        ([rank(i, host, machine="m") for i, host in enumerate(HOSTS)], "4 ranks share 2 cores on a to d"),
        ([rank(0, "a"), rank(1, "b"), rank(2, "b", threads=None)], "3 threads of 2 ranks share 2 cores on b"),
        ([rank(0, "a"), rank(1, "b"), rank(2, "b")], "different numbers of ranks: a 1, b 2"),
        ([rank(0, "a", thread_level="single"), rank(1, "b")], "thread level single; Horovod"),
        ([rank(0, "a"), rank(1, "b", versions={"MPI": "MPICH 4"})], "MPI differs: a Open MPI v4.1.8, b MPICH 4"),
    ],
)
def test_ranks(ranks: list[Rank], says: str) -> None:
    assert any(says in warning for warning in find(ranks, HOSTS[:1], Links({}, [])))


def test_rates_for_people() -> None:
    assert [rate(bits) for bits in (9.4e7, 2.5e9)] == ["94.0 Mbit/s", "2.50 Gbit/s"]


class World:
    """Where rank 0 has been asked to write to a folder that this rank's machine does not have."""

    rank = 1

    def bcast(self, own: object, root: int) -> tuple[argparse.Namespace, int]:
        return argparse.Namespace(json="rank 0 has it"), 0


def test_only_rank_0_needs_the_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other ranks ended with status 2, and the job with them, without a word."""
    monkeypatch.setattr(sys, "argv", ["check_cluster.py", "--json", str(tmp_path / "missing" / "check.json")])
    assert check_cluster._options(World()).json == "rank 0 has it"


def test_json_on_standard_output_is_no_file_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_cluster.py", "--json", "-"])
    assert check_cluster._parsed().json == "-"


@pytest.mark.parametrize(
    "words", [("--seconds", "nan"), ("--entries", "0"), ("--density", "2"), ("--most-pairs", "1.5")]
)
def test_numbers_that_cannot_be_are_refused(words: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--seconds nan`` was taken."""
    monkeypatch.setattr(sys, "argv", ["check_cluster.py", *words])
    with pytest.raises(SystemExit, match="2"):
        check_cluster._parsed()
