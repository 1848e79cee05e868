"""Shared by all tests: a fixed seed for each, and a header that says which MPI is used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", settings(), deadline=None)  # first calls compile; and no test asserts a time
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_report_header() -> str:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        return "MPI: no mpirun, real jobs are skipped"
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return f"MPI: {(answer.splitlines() or ['unknown'])[0]}"
