"""mpi_scripts/check_cluster.py: what it measures, and that it names what is wrong."""

import json
from pathlib import Path

import pytest

from tests.mpi.launch import run_job

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

SCRIPT = "mpi_scripts/check_cluster.py"


@pytest.mark.ranks
def test_two_ranks_on_one_machine(tmp_path: Path) -> None:
    json_file, plot = tmp_path / "check.json", tmp_path / "check.png"
    short = ["--seconds", "0.05", "--entries", "100000"]
    job = run_job(SCRIPT, *short, "--json", str(json_file), "--plot", str(plot), timeout=120)
    assert "all 2 ranks are on one host" in job.output
    record = json.loads(json_file.read_text())
    assert [each["rank"] for each in record["ranks"]] == [0, 1]
    assert [each["local_rank"] for each in record["ranks"]] == [0, 1]
    assert {(pair["from"], pair["to"]) for pair in record["pairs"]} == {("rank 0", "rank 1"), ("rank 1", "rank 0")}
    assert all(pair["bits_per_second"] > 0 and pair["seconds"] > 0 for pair in record["pairs"])
    assert len(record["ring"]) == 2
    assert record["network"]["packed"] == pytest.approx(0.015 * record["network"]["dense"])  # 12 bytes of 8 at 1 %
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ranks
def test_wrong_options_are_refused_once() -> None:
    job = run_job(SCRIPT, "--density", "2", timeout=120, check=False)
    assert job.returncode not in (0, None)
    assert job.output.count("argument --density: '2': a number above 0 and at most 1") == 1
