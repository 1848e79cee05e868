"""A cable is pulled on the emulated cluster: training goes on once it is back, or says what it waited for."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_scripts.emulated_cluster import Cluster, Job, mpirun, why_not_here
from tests.mpi.launch import job_environment

NOT_HERE = why_not_here()
pytestmark = [pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE)), pytest.mark.ranks]

RANKS = 3
STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job_environment(60).items():
            patch.setenv(name, value)
        with Cluster.temporary(RANKS, "1gbit") as made:
            yield made


class Training:
    """A job under way on the cluster.

    Args:
        cluster: where.
        folder: what it writes into.
        patience: seconds that a rank may wait.
        limit: seconds for all of it; a job that has lost a host lasts so long, or until the host is back.
    """

    def __init__(self, cluster: Cluster, folder: Path, patience: float, limit: float) -> None:
        self._folder = folder
        folder.mkdir()
        command = [sys.executable, "-m", "tests.mpi.jobs.unplugged", str(folder), str(STEPS), str(patience)]
        self._files = [folder / f"rank {rank}" for rank in range(RANKS)]
        self._jobs: list[Job] = []
        environment = {"RINGPRUNE_TEST_SECONDS": str(limit - 5)}
        options = {"timeout": limit, "environment": environment, "output": "capture"}
        self._thread = threading.Thread(target=lambda: self._jobs.append(mpirun(cluster, RANKS, command, **options)))
        self._thread.start()

    def steps(self) -> int:
        try:
            return int((self._folder / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def wait_for_step(self, step: int) -> None:
        while self.steps() < step and self._thread.is_alive():
            time.sleep(0.01)

    def wait_for_outcomes(self) -> None:
        while not all(file.exists() for file in self._files) and self._thread.is_alive():
            time.sleep(0.01)

    def outcomes(self) -> list[str]:
        self._thread.join()
        assert all(file.exists() for file in self._files), self._jobs[0].output
        return [file.read_text() for file in self._files]


def test_training_goes_on_when_the_cable_is_back_and_nothing_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed = Training(cluster, tmp_path / "undisturbed", 40, 120).outcomes()
    training = Training(cluster, tmp_path / "disturbed", 40, 120)
    training.wait_for_step(10)
    cluster.plug("h2", connected=False)
    time.sleep(1)  # what was sent before may still arrive
    made = training.steps()
    time.sleep(2)
    later = training.steps()
    cluster.plug("h2", connected=True)
    assert later == made < STEPS, "training went on without the host"
    assert training.outcomes() == undisturbed
    assert len(set(undisturbed)) == 1 and not undisturbed[0].startswith("error")


def test_without_the_cable_every_rank_says_what_it_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "cut", 4, 80)
    training.wait_for_step(10)
    cluster.plug("h2", connected=False)
    training.wait_for_outcomes()
    cluster.plug("h2", connected=True)
    outcomes = training.outcomes()
    waited_for = r'"(bucket \d+ (indices|values|dense)|verdict).*" \(\w+.*\)'
    for rank, outcome in enumerate(outcomes):
        assert re.match(rf"error: {waited_for} was not done after 4.0 s on rank {rank}", outcome), outcome
