"""Starts the program that runs once more, as the ranks of a job on an emulated cluster, for the rows that it writes."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulated_cluster import Cluster, ClusterError, launch, mpirun

from exchanges.methods import mca_flags

__all__ = ["rows_of_job"]

TAIL = 12  # lines of a failed job that are shown


def rows_of_job(
    cluster: Cluster, ranks: int, words: Sequence[str], *, timeout: float, torch: bool = False, ring: bool = True
) -> list[dict[str, Any]]:
    """The rows of one job.

    Args:
        cluster: where it runs.
        ranks: how many.
        words: of the command line; ``--json`` is added.
        timeout: seconds.
        torch: it needs no MPI.
        ring: Open MPI is told to allreduce along a ring.

    Raises:
        ClusterError: it failed; says how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="ringprune-job-") as folder:
        written = Path(folder) / "rows.json"
        command = [sys.executable, sys.argv[0], *words, "--json", str(written)]
        if torch:
            job = launch(cluster, ranks, command, timeout=timeout, output="capture")
        else:
            job = mpirun(cluster, ranks, command, flags=mca_flags(ring), timeout=timeout, output="capture")
        if job.returncode or not written.exists():
            lines = [line for line in job.output.splitlines() if line.strip()][-TAIL:]
            end = "".join(f"\n    {line}" for line in lines)
            raise ClusterError(f"its job ended with status {job.returncode} after {job.seconds:.0f} s{end}")
        found: list[dict[str, Any]] = json.loads(written.read_text())
    return found
