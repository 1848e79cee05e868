"""bench_allreduce.py: its command line, and a job whose rows are documented."""

import json
import re
from pathlib import Path

import bench_allreduce
import pytest

from tests.mpi.launch import run_job

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "at least 2"),
        (["--rate", "1 gb"], "100mbit"),
        (["--megabytes", "0"], "above 0"),
        (["--runs", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_allreduce.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.ranks
def test_a_job_measures_every_sum_and_writes_documented_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = "--rate", "10gbit", "--megabytes", "0.1,1", "--runs", "3", "--json", str(file)
    run_job("mpi_scripts.bench_allreduce", *words, np=2, launcher="mpirun", timeout=120)
    rows = json.loads(file.read_text())
    assert [(row["method"], row["megabytes"]) for row in rows] == [
        (method, size) for size in (0.1, 1.0) for method in ("ringprune", "open-mpi", "gloo")
    ]
    section = API.read_text().split("## Comparing sums")[1].split("\n## ")[0]
    documented = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in section.splitlines() if "| `" in line))
    for row in rows:
        assert set(documented) <= set(row)
        assert len(row["seconds_each"]) == 3
        assert min(row["seconds_each"]) == row["best_seconds"] > 0
        assert row["seconds_floor"] == pytest.approx(row["megabytes"] * 1e6 * 8 * 1514 / 1448 / 10e9)  # 2 (P-1)/P is 1
        assert row["share_of_floor"] == pytest.approx(row["seconds_floor"] / row["seconds"])


@pytest.mark.ranks
def test_links_of_a_speed_that_nobody_told_have_no_floor() -> None:
    """They were taken for 1 Gbit/s, so that shared memory took a tenth of its floor."""
    words = "--megabytes", "0.1", "--runs", "1", "--json", "-"
    job = run_job("mpi_scripts.bench_allreduce", *words, np=2, launcher="mpirun", timeout=120)
    assert job.output.count('"rate": "as it is"') == job.output.count('"seconds_floor": null') == 3
    assert "sums over the ranks" in job.output
