"""The probe finds the link that messages were made to take, and all ranks find the same."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringprune as rp
from ringprune.advise.job import KINDS
from ringprune.prediction import Kind, Link, MeasuredLink
from ringprune.probing.links import probe, reached
from tests.mpi.launch import Launcher, run_job


class Clocked:
    """A communicator of ranks that are not there, on which messages take what a link says, by a clock of its own."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.size, self.now = link, size, 0.0

    def clock(self) -> float:
        return self.now

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> "Clocked":
        self.now += self.link.latency_seconds + tensor.nbytes / self.link.bytes_per_second
        self.result = into
        return self

    def allgather(self, tensor: Tensor, *, name: str) -> "Clocked":
        self.result = tensor.repeat(self.size)
        return self

    def wait(self) -> Tensor:
        return self.result


@given(st.floats(1e5, 2e10), st.floats(1e-6, 1e-3), st.integers(2, 17))
def test_it_finds_the_link(bytes_per_second: float, latency: float, size: int) -> None:
    comm = Clocked(Link(bytes_per_second, latency), size)
    found = probe(comm, comm.clock)
    # A short message's own 4 bytes pass the link too, and are then missing from a long one of a million bytes at least.
    assert found.latency_seconds == pytest.approx(latency + 4 / bytes_per_second, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(bytes_per_second, rel=1e-4)


def test_all_ranks_find_the_same_and_one_alone_has_none() -> None:
    def rank(comm: rp.comm.Communicator) -> Link:
        return probe(comm)

    found = rp.simulate(3, rank)
    assert found[1:] == found[:-1]
    with pytest.raises(rp.ConfigurationError, match="mpirun -np 4"):
        rp.simulate(1, rank)


@given(
    st.dictionaries(st.sampled_from(KINDS), st.floats(0.01, 1.0), min_size=1),
    st.floats(1e6, 1e9),
    st.floats(0.0, 1e-4),
    st.integers(2, 9),
)
def test_shares_that_collectives_reach_are_found(
    shares: dict[Kind, float], rate: float, latency: float, ranks: int
) -> None:
    link = Link(rate, latency, shares)
    # So long that the fewest bytes decide about the algorithm, and not the hops.
    points = {kind: tuple((n, link.seconds(kind, n, ranks)) for n in (1e3, 1e9)) for kind in KINDS}
    found = reached(Link(rate, latency), MeasuredLink(points, ranks))
    assert found.bytes_per_second == rate
    assert found.shares == pytest.approx({kind: shares.get(kind, 1.0) for kind in KINDS}, rel=1e-3)


def test_a_collective_faster_than_the_link_reaches_all_of_it() -> None:
    found = reached(Link(1e6, 0.0), MeasuredLink({"allreduce": ((1.0, 1e-9), (1e6, 1e-3))}, 4))
    assert found.shares == {"allreduce": 1.0}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "over", "kinds"),
    [
        ("mpirun", "mpi", KINDS),
        ("horovodrun", "horovod", set(KINDS) - {"ring"}),  # Horovod sends nothing from rank to rank
        ("torchrun", "torch", KINDS),
    ],
)
def test_a_job_asks_about_what_it_trains_over(tmp_path: Path, launcher: Launcher, over: str, kinds: set[Kind]) -> None:
    """Until 2026-11-25 answers for Horovod and torch rested on what MPI's collectives took."""
    file = str(tmp_path / "rows.json")
    asked = ["--communicator", over] if over == "mpi" else []  # the others are what such a job has
    command = ["advise", "--model", "resnet18", "--rate", "here", "--measure", "--json", file, *asked]
    job = run_job("ringprune", *command, np=2, launcher=launcher, timeout=120)
    assert job.output.count("with 2 ranks") == 1, "one rank answers for all"
    rows = json.loads(Path(file).read_text())
    assert {(row["ranks"], row["communicator"]) for row in rows} == {(2, over)}
    reached = ", ".join(rf"{kind} \d+ %" for kind in sorted(kinds))
    for row in rows:
        assert re.fullmatch(f"measured on 2 ranks, whose collectives reach of it: {reached}", row["link"])
        assert row["speeds"].endswith(", 2 ranks at once")
    assert torch.tensor([row["seconds"] for row in rows]).isfinite().all()


@pytest.mark.ranks
def test_links_of_horovod_without_mpi_are_not_guessed() -> None:
    command = ["advise", "--model", "resnet18", "--rate", "here"]
    job = run_job("ringprune", *command, np=2, launcher="horovodrun-gloo", timeout=120, check=False)
    assert job.returncode
    assert "which Horovod does not have, and MPI is not there" in job.output
    assert "--communicator torch" in job.output
