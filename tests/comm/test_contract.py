"""The contract of communicators on simulated ranks; tests/mpi runs it as real jobs."""

import pytest

from ringprune.comm import simulate
from tests.comm.contract import CHECKS, Check


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_simulated(check: Check, size: int) -> None:
    simulate(size, check, timeout=20)
