"""The contract of communicators as real jobs: over MPI and Horovod, started by mpirun and horovodrun."""

import pytest

from tests.comm.contract import CHECKS
from tests.mpi.launch import Launcher, run_job

JOBS: list[tuple[str, Launcher, int]] = [
    ("mpi", "mpirun", 1),
    ("mpi", "mpirun", 2),
    ("mpi", "mpirun", 4),
    ("horovod", "mpirun", 2),
    ("horovod", "mpirun", 4),
    ("horovod", "horovodrun", 2),
    ("horovod", "horovodrun-gloo", 2),
]


@pytest.mark.parametrize(("kind", "launcher", "np"), JOBS)
def test_contract(kind: str, launcher: Launcher, np: int) -> None:
    job = run_job("tests.mpi.jobs.contract", kind, np=np, launcher=launcher, timeout=90)
    assert f"{len(CHECKS)} checks passed on {np} ranks" in job.output
