"""Training on real ranks: the laws over each library that can carry them, and what happens when a rank dies."""

import re

import pytest

from tests.mpi.launch import Launcher, run_job

pytestmark = pytest.mark.ranks

JOBS: list[tuple[str, Launcher, int, int]] = [
    ("mpi", "mpirun", 2, 50),
    ("mpi", "mpirun", 4, 200),
    ("horovod", "mpirun", 4, 200),
    ("horovod", "horovodrun-gloo", 2, 50),  # two: sums are compared to the bit
    ("torch", "torchrun", 2, 50),
    ("torch", "torchrun", 3, 50),
]


@pytest.mark.parametrize(("kind", "launcher", "np", "steps"), JOBS)
def test_the_laws_hold_on_real_ranks(kind: str, launcher: Launcher, np: int, steps: int) -> None:
    job = run_job("tests.mpi.jobs.training", kind, str(steps), np=np, launcher=launcher, timeout=240)
    assert re.search(rf"\d+ checks passed on {np} ranks", job.output)


def test_started_by_horovodrun_it_is_what_plain_horovod_is() -> None:
    """It calls mpirun, which starts the other jobs: what its ranks get to see is all that is its own."""
    job = run_job("tests.mpi.jobs.training", "horovod", "20", "transparency", np=2, launcher="horovodrun", timeout=120)
    assert "6 checks passed on 2 ranks" in job.output


@pytest.mark.parametrize(("kind", "launcher"), [("mpi", "mpirun"), ("horovod", "mpirun"), ("torch", "torchrun")])
def test_sharded_embeddings_on_real_ranks(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.sharded", kind, np=3, launcher=launcher, timeout=120)
    assert "5 checks passed on 3 ranks" in job.output


@pytest.mark.parametrize(("kind", "launcher"), [("mpi", "mpirun"), ("horovod", "mpirun"), ("torch", "torchrun")])
def test_a_policy_is_chosen_on_real_ranks(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.auto", kind, np=3, launcher=launcher, timeout=180)
    assert "2 checks passed on 3 ranks" in job.output


@pytest.mark.parametrize("np", [2, 3])
def test_the_hook_of_distributed_data_parallel(np: int) -> None:
    job = run_job("tests.mpi.jobs.ddp", np=np, launcher="torchrun", timeout=240)
    assert f"checks of the hook passed on {np} ranks" in job.output


DYING: list[tuple[str, Launcher]] = [
    ("mpi", "mpirun"),
    ("horovod", "mpirun"),
    ("horovod", "horovodrun-gloo"),
    ("torch", "torchrun"),
]


@pytest.mark.parametrize(("kind", "launcher"), DYING)
def test_survivors_of_a_dead_rank_say_which_collective_they_were_in(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.dying", kind, "iwp", np=3, launcher=launcher, timeout=90, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert "without rank 1" not in job.output
    # In quotes, with what it was: a traceback's own lines name buckets and the verdict too.
    assert re.search(r'"(bucket \d+ \w+|verdict)[^"]*" \(\w+ of \d+ \w+', job.output), job.tails()


@pytest.mark.parametrize("kind", ["mpi", "horovod"])
def test_survivors_of_a_dead_rank_say_which_buckets_of_a_schedule_they_missed(kind: str) -> None:
    """They were ended without a word, but for one that had waited for five seconds."""
    job = run_job("tests.mpi.jobs.dying", kind, "p3", np=3, timeout=90, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert "without rank 1" not in job.output
    assert re.search(r"rank [02] stopped while waiting for the averages of \d+ buckets, from bucket", job.output), (
        job.tails()
    )
