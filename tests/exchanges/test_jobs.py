"""bench_exchange.py inside a real job and on an emulated cluster: rows of every method, a line where one cannot run."""

import json
import os
from pathlib import Path

import pytest
from emulated_cluster import why_not_here

from tests.mpi.launch import run_job

SENT = 4 * (48 * 96 + 96 + 96 * 10 + 10)  # dense float32 on 2 ranks: 2 (P-1)/P = 1


@pytest.mark.ranks
def test_methods_are_measured_in_a_job(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    path, figure = tmp_path / "rows.json", tmp_path / "rows.png"
    words = f"--models tiny --rates 10gbit --steps 3 --warmup 1 --json {path} --plot {figure}".split()
    words += ["--peer", "tests.mpi.jobs.exchange:by_mpi"]
    job = run_job("tests.mpi.jobs.exchange", *words, timeout=120, environment={"OMP_NUM_THREADS": "1"})
    assert "4 dense exchanges average on 2 ranks" in job.output
    assert "skipped: horovod-fp32-ring: needs a job whose Open MPI allreduces along a ring" in job.output
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    dense = {"horovod-fp32": 1, "horovod-fp16": 2, "gloo-fp32": 1, "gloo-fp16": 2}
    assert {*dense, "ringprune:dense", "ringprune:iwp", "peer"} <= set(rows)
    for row in rows.values():
        assert (row["model"], row["ranks"], row["rate"], row["steps"], row["hosts"]) == ("tiny", 2, "10gbit", 3, 1)
        assert row["dense_bytes_per_rank"] == SENT
        assert len(row["seconds_each"]) == 3
        assert min(row["seconds_each"]) > 0
        assert row["nic_ratio"] is None or row["nic_bytes_per_rank"] > 0
    for method, ratio in dense.items():
        assert rows[method]["wire_ratio"] == rows[method]["value_ratio"] == ratio
        assert rows[method]["seconds_floor"] == pytest.approx(SENT / ratio * 8 * 1514 / 1448 / 10e9)
        assert rows[method]["compute_seconds"] is rows[method]["communication_seconds"] is None
    ours = rows["ringprune:iwp"]
    assert 1 < ours["wire_ratio"] < ours["value_ratio"]
    assert 0 < ours["compute_seconds"] < ours["seconds"]
    assert ours["communication_seconds"] > 0
    assert ours["realised_density"] == pytest.approx(0.01, rel=0.1)
    assert rows["peer"]["counted_bytes_per_rank"] is None
    # Gloo knows no shared memory: lo carries what the account says, and the barriers
    assert rows["gloo-fp32"]["nic_bytes_per_rank"] > SENT or os.uname().sysname != "Linux"
    assert figure.stat().st_size > 5000


@pytest.mark.ranks
def test_a_cluster_is_made_for_the_measurement_and_taken_down(tmp_path: Path) -> None:
    if reason := why_not_here():
        pytest.skip(reason)
    path = tmp_path / "rows.json"
    words = f"--models tiny --rates 100mbit --ranks 2 --steps 2 --communicator horovod --json {path}".split()
    words += ["--methods", "gloo-fp32,ringprune:iwp-ring"]
    job = run_job("tests.mpi.jobs.exchange", *words, launcher="alone", timeout=240)
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["gloo-fp32", "ringprune:iwp-ring"], job.output
    for row in rows:
        assert (row["rate"], row["ranks"], row["hosts"], row["emulated"]) == ("100mbit", 2, 2, True)
        assert row["interfaces"] == ["eth0"]
        assert row["nic_bytes_per_rank"] > row["counted_bytes_per_rank"]
        assert row["seconds_floor"] == pytest.approx(row["counted_bytes_per_rank"] * 8 * 1514 / 1448 / 100e6)
