"""Hierarchies and groups on real ranks, and on two hosts where this machine can hold a cluster of them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, Launcher, run_job

pytestmark = pytest.mark.ranks

JOBS: list[tuple[str, Launcher, int]] = [
    ("mpi", "mpirun", 4),
    ("mpi", "mpirun", 3),
    ("horovod", "mpirun", 4),
    ("horovod", "horovodrun-gloo", 3),
    ("torch", "torchrun", 4),
]


@pytest.mark.parametrize(("kind", "launcher", "np"), JOBS)
def test_the_laws_of_a_hierarchy_hold_on_real_ranks(kind: str, launcher: Launcher, np: int) -> None:
    job = run_job("tests.mpi.jobs.hierarchy", kind, np=np, launcher=launcher, timeout=240)
    assert re.search(rf"\d+ checks passed on {np} ranks", job.output)


GROUPS: list[tuple[str, Launcher]] = [("mpi", "mpirun"), ("horovod", "mpirun"), ("torch", "torchrun")]


@pytest.mark.parametrize(("kind", "launcher"), GROUPS)
def test_a_rank_outside_the_group_waits_for_nobody(kind: str, launcher: Launcher) -> None:
    job = run_job("tests.mpi.jobs.outside", kind, np=3, launcher=launcher, timeout=120)
    assert f"{kind}: nobody was waited for" in job.output


# -- two hosts --------------------------------------------------------------------------------------------------------

CLUSTER = ROOT / "mpi_scripts" / "cluster"


def cluster(folder: Path, *arguments: str, timeout: float = 60.0) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"RINGPRUNE_CLUSTER": str(folder), "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(CLUSTER), *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cluster"
    up = cluster(folder, "up", "2", "1gbit")
    if up.returncode == 3:
        pytest.skip(f"no cluster here: {up.stderr.strip().splitlines()[-1]}")
    assert up.returncode == 0, up.stderr
    yield folder
    cluster(folder, "down")


@pytest.mark.parametrize("kind", ["mpi", "horovod"])
def test_bytes_between_hosts_are_those_that_are_counted(kind: str, hosts: Path) -> None:
    program = [sys.executable, "-m", "tests.mpi.jobs.hosts", kind]
    command = ["mpirun", "--ppn", "2", "--timeout", "150", "4", "--", *program]
    job = cluster(hosts, *command, timeout=170)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "2 nodes of 2 ranks" in job.stdout, job.stdout
