"""Ranks that die, raise or never come: the job ends, soon, and says which collective the others were in."""

import re

import psutil
import pytest

from tests.mpi.launch import Launcher, run_job

pytestmark = pytest.mark.ranks

COLLECTIVE = '"bucket 3 values" (allreduce of 1200 float32)'
STACKS = [("mpi", "mpirun"), ("horovod", "mpirun"), ("torch", "torchrun"), ("horovod", "horovodrun-gloo")]


@pytest.mark.parametrize("how", ["exits", "is killed", "raises"])
@pytest.mark.parametrize(("kind", "launcher"), STACKS)
def test_a_rank_that_is_gone_ends_the_job(kind: str, launcher: Launcher, how: str) -> None:
    for _ in range(3):
        job = run_job("tests.mpi.jobs.trouble", kind, how, "none", launcher=launcher, timeout=90, check=False)
        assert job.returncode not in (0, None), job.tails()
        assert "Timeout (" not in job.output, "only the watchdog ended it:\n" + job.tails()
        if COLLECTIVE in job.output or "closing signal SIGTERM" not in job.output:
            break  # else torchrun has ended the other rank before it could speak
    assert COLLECTIVE in job.output, job.tails()
    if how == "raises":
        assert "ValueError: boom on rank 1" in job.output


@pytest.mark.parametrize(("kind", "launcher"), STACKS[:3])
def test_the_time_limit_of_the_communicator(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.trouble", kind, "never comes", "1", launcher=launcher, timeout=90, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert "Timeout (" not in job.output, "only the watchdog ended it:\n" + job.tails()
    assert f"CommunicatorError: {COLLECTIVE} was not done after 1.0 s on rank 0" in job.output, job.tails()


@pytest.mark.parametrize(
    ("where", "policy", "waits_in"),
    [("flush", "dgc", "flush()"), ("flush", "scalecom", "flush()"), ("load", "random_k", "the check at the start")],
)
@pytest.mark.parametrize(("kind", "launcher"), [("mpi", "mpirun"), ("torch", "torchrun")])
def test_ranks_in_different_calls_wait_for_each_other(
    kind: str, launcher: Launcher, where: str, policy: str, waits_in: str
) -> None:
    """They took each other's messages for their own: Open MPI broke the heap, Gloo aborted, and nobody said why."""
    job = run_job("tests.mpi.jobs.elsewhere", kind, policy, where, launcher=launcher, np=3, timeout=90, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert not re.search("malloc|free\\(\\)|SIGABRT|Signal: |Signal 6", job.output), job.tails()
    assert f'CommunicatorError: "{waits_in}" (barrier of 1 int32) was not done after 3.0 s' in job.output, job.tails()


@pytest.mark.parametrize(("kind", "launcher"), STACKS[:3])
def test_a_failed_check_fails_on_all_ranks(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.trouble", kind, "raises in a check", "2", launcher=launcher, timeout=90, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert "the collective failed on ranks [0, 1]" in job.output, job.tails()
    assert "ValueError: boom on rank 1" in job.output, job.tails()


def test_a_failing_job_fails_the_test_and_shows_its_ranks() -> None:
    with pytest.raises(pytest.fail.Exception) as raised:
        run_job("tests.mpi.jobs.trouble", "mpi", "raises", "none", timeout=90)
    assert re.search(r"exited with \d+ after .*--- rank 1\n.*ValueError: boom on rank 1", str(raised.value), re.DOTALL)


@pytest.mark.parametrize(("launcher", "limit"), [("mpirun", 8.0), ("horovodrun-gloo", 15.0), ("torchrun", 20.0)])
def test_nothing_outlives_its_time_limit(launcher: Launcher, limit: float) -> None:
    for seconds in (limit, 4 * limit):
        job = run_job("tests.mpi.jobs.endless", launcher=launcher, timeout=seconds, check=False)
        assert job.returncode is None
        pids = [int(pid) for pid in re.findall(r"pid=(\d+);", job.output)]
        assert not any(psutil.pid_exists(pid) for pid in pids)
        if len(pids) == 2:
            break  # else it was ended before it had started: on a busy machine that takes longer
    assert len(pids) == 2, job.tails()


@pytest.mark.parametrize("policy", ["iwp", "dense"])
def test_resuming_on_rank_0_alone_is_refused_where_horovod_broadcasts(policy: str) -> None:
    """As Horovod's examples resume: ranks broadcast different things, and waited for each other without end."""
    job = run_job("tests.mpi.jobs.resuming", policy, launcher="mpirun", timeout=60, check=False)
    assert job.returncode not in (0, None), job.tails()
    assert "RankMismatchError: rank 0 continues at step 3, rank 1 at step 0: load a checkpoint on all" in job.output
    assert "where Horovod's rank 0 alone loads, all do here" in job.output, job.tails()
