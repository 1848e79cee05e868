"""The contract of communicators as real jobs: over MPI, Horovod and torch.distributed, each with its launchers."""

import pytest

from tests.comm.contract import CHECKS
from tests.mpi.launch import Launcher, run_job

pytestmark = pytest.mark.ranks

JOBS: list[tuple[Launcher, int, list[str]]] = [
    ("alone", 1, ["mpi"]),
    ("mpirun", 2, ["mpi", "horovod"]),
    ("mpirun", 4, ["horovod", "mpi"]),
    ("horovodrun", 2, ["horovod", "mpi"]),
    ("horovodrun-gloo", 2, ["horovod"]),
    ("torchrun", 1, ["torch"]),
    ("torchrun", 2, ["torch"]),
    ("torchrun", 3, ["torch"]),
]


@pytest.mark.parametrize(
    ("launcher", "np", "kinds"), JOBS, ids=[f"{job[0]}-{job[1]}-{'+'.join(job[2])}" for job in JOBS]
)
def test_contract(launcher: Launcher, np: int, kinds: list[str]) -> None:
    job = run_job("tests.mpi.jobs.contract", *kinds, np=np, launcher=launcher, timeout=120)
    for kind in kinds:
        assert f"{kind}: {len(CHECKS)} checks passed on {np} ranks" in job.output


ONLY: list[tuple[str, Launcher]] = [("mpi", "mpirun"), ("horovod", "mpirun"), ("torch", "torchrun")]


@pytest.mark.parametrize(("kind", "launcher"), ONLY)
def test_what_only_one_of_them_promises(kind: str, launcher: Launcher) -> None:
    job = run_job(f"tests.mpi.jobs.{kind}_only", np=4, launcher=launcher, timeout=120)
    assert f"{kind}_only passed" in job.output
