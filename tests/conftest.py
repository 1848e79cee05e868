"""Shared by all tests: a fixed seed for each, who may run beside whom, and a header that says which MPI is used."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from ringprune.comm.choice import place_open_mpi
from tests.mpi import launch

place_open_mpi()  # some tests import mpi4py themselves: MPI once ended pytest there, without a word
settings.register_profile("untimed", settings(), deadline=None)  # first calls compile; and no test asserts a time
settings.load_profile("untimed")


_WITH_RANKS = (
    "tests/mpi/",
    "tests/embeddings/",
    "tests/examples/",
    "tests/exchanges/",
    "tests/profiles/test_run.py",
    "tests/probing/test_links.py",
    "tests/replays/",
    "tests/test_documents.py::test_programs_run",
    "tests/test_documents.py::test_pieces_continue_the_quick_start",
    "tests/test_documents.py::test_migration_is_the_lines_of_the_diff",
    "_jobs.py::",
)
"""Tests whose jobs have several processes: two of those at a time would be too many for two cores."""

_WAITING = ("tests/mpi/test_trouble.py",)
"""Those of them whose ranks mostly wait, for one that does not come: they may run beside others."""


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test trains; the others are skipped with one line."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    address = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.hookimpl(optionalhook=True)  # pytest also runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests with jobs of several busy processes all go to one worker; any other goes where there is room."""
    # xdist 3.8 has a mark for this, which pytest 9.2 does not show it.
    from xdist.scheduler import LoadScopeScheduling

    class OneJobAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            busy = any(part in nodeid for part in _WITH_RANKS) and not any(part in nodeid for part in _WAITING)
            return "ranks" if busy else nodeid

    return OneJobAtATime(config, log)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def told_whether_ranks_may_start(request: pytest.FixtureRequest) -> None:
    """``run_job`` refuses where a test lacks the mark, or the place among those of which one runs at a time."""
    alone = any(part in request.node.nodeid for part in _WITH_RANKS)
    launch.ranks_may_start = alone and request.node.get_closest_marker("ranks") is not None


def pytest_report_header() -> str:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        return "MPI: no mpirun, real jobs are skipped"
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return f"MPI: {(answer.splitlines() or ['unknown'])[0]}"
