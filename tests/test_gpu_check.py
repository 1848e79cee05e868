"""mpi_scripts/gpu_check: says that there is no GPU, and its parts work where the CPU stands in for one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpi_scripts import gpu_check

SCRIPTS = Path(__file__).parents[1] / "mpi_scripts"


def test_without_a_gpu_one_line_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["env", f"PYTHON={sys.executable}", str(SCRIPTS / "gpu_check.sh")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.count("\n") == 1
    assert "nothing" in done.stdout
    assert "checked" in done.stdout


def test_packages_that_are_missing_or_too_old_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The build, or every step after it, failed with an error of something else."""
    assert gpu_check.check_packages({"torch": 2, "numpy": 0}) == 0
    assert gpu_check.check_packages({"torch": 99, "numpy": 0, "not-there": 0}) == 1
    assert capsys.readouterr().out == "gpu check: nothing can be built or run without torch>=99, not-there\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", [["ops", "--small"], ["train"]])
def test_parts_work_with_the_cpu_in_place_of_a_gpu(part: list[str]) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *part, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout
