"""The reductions as real MPI jobs."""

import pytest

from tests.mpi.launch import run_job
from tests.reduction.checks import CHECKS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("np", [2, 3, 4])
def test_reductions(np: int) -> None:
    job = run_job("tests.mpi.jobs.reduction", np=np, timeout=120)
    assert f"{len(CHECKS)} checks passed on {np} ranks" in job.output
