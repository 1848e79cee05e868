"""check_cluster and the launch files on the emulated cluster, over an ssh that brings no environment along."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_scripts.emulated_cluster import Cluster, mpirun, why_not_here
from mpi_scripts.emulated_cluster.jobs import STAND_INS, entered
from tests.mpi.launch import ROOT, job_environment

NOT_HERE = why_not_here()
LAUNCH = ROOT / "mpi_scripts" / "launch"

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job_environment(120).items():
            patch.setenv(name, value)
        if (Path(sys.prefix) / "bin" / "orted").exists():
            patch.setenv("OPAL_PREFIX", sys.prefix)
        with Cluster.temporary(4, "1gbit") as made:
            yield made


@pytest.mark.slow
def test_check_cluster_names_the_slow_host(cluster: Cluster, tmp_path: Path) -> None:
    cluster.rate("50mbit", host="h2", direction="up")
    try:
        script = [sys.executable, "mpi_scripts/check_cluster.py", "--json", str(tmp_path / "check.json")]
        job = mpirun(cluster, 4, [*script, "--seconds", "0.2", "--entries", "100000"], timeout=120, output="capture")
    finally:
        cluster.rate("1gbit")
    assert job.returncode == 0, job.output
    record = json.loads((tmp_path / "check.json").read_text())
    assert [each["host"] for each in record["ranks"]] == ["h0", "h1", "h2", "h3"]
    # 50 Mbit/s with frames are 48 of payload; on a busy machine a burst of the shaper makes it 50.
    slow = re.compile(r"h2 sends slowly: [45]\d(\.\d+)? Mbit/s at most")
    assert any(slow.match(warning) for warning in record["warnings"]), record["warnings"]


@pytest.fixture
def files(cluster: Cluster, tmp_path: Path) -> Path:
    """A host file, Slurm's list of hosts, and an ssh that starts commands with next to no variables."""
    names = [host.name for host in cluster.hosts]
    (tmp_path / "hosts").write_text("# hosts\n" + "".join(f"{name} slots=1\n" for name in names))
    bare = f'exec env -i PATH=/usr/sbin:/usr/bin:/bin RINGPRUNE_CLUSTER={cluster.folder} "{STAND_INS}/ssh" "$@"\n'
    for name, text in (("ssh", bare), ("scontrol", f"printf '%s\\n' {' '.join(names)}\n")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def on_h0(cluster: Cluster, files: Path, *words: str, **variables: str) -> str:
    line, environment = entered(cluster, "h0", words)
    environment |= variables | {"PATH": f"{files}{os.pathsep}{environment['PATH']}"}
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stack", ["mpirun", "mpi", "gloo"])
def test_host_files(cluster: Cluster, files: Path, stack: str) -> None:
    name = "mpirun.sh" if stack == "mpirun" else "horovodrun.sh"
    if stack != "mpirun":
        pytest.importorskip("horovod")
    said = on_h0(cluster, files, str(LAUNCH / name), str(files / "hosts"), "hostname", STACK=stack)
    assert sorted(line.rpartition(":")[2] for line in said.split()) == ["h0", "h1", "h2", "h3"]


def test_slurm_files_find_the_hosts(cluster: Cluster, files: Path) -> None:
    """Slurm is stood in for by its list of hosts."""
    slurm = {"SLURM_JOB_NODELIST": "h[0-3]", "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "3"}
    said = on_h0(cluster, files, "bash", str(LAUNCH / "mpirun.sbatch"), "printenv", "OMP_NUM_THREADS", **slurm)
    assert said.split() == ["3"] * 4
