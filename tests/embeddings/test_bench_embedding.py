"""bench_embedding.py: words that are drawn as Zipf has it, its command line, and a job whose rows are documented."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_embedding
import numpy as np
import pytest
from embeddings.words import Size, batches
from emulated_cluster import ClusterError

from tests.mpi.launch import run_job

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
SIZE = Size(rows=50, dim=4, tokens=20_000, dense=10, exponent=1.0, compute_ms=0.0)


def test_words_are_as_frequent_as_zipfs_law_has_it() -> None:
    words = next(batches(SIZE, rank=0, seed=0)).numpy()
    expected = 1 / np.arange(1, SIZE.rows + 1)
    expected *= SIZE.tokens / expected.sum()
    # Counts of independent draws: within five standard deviations each.
    assert (np.abs(np.bincount(words, minlength=SIZE.rows) - expected) < 5 * np.sqrt(expected)).all()


def test_ranks_and_seeds_draw_others() -> None:
    drawn = [next(batches(SIZE, rank, seed)) for rank, seed in ((0, 0), (1, 0), (0, 1))]
    assert not any(bool((drawn[i] == drawn[j]).all()) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "shardet"], "did you mean sharded?"),
        (["--ranks", "4,1"], "at least 2; one alone sends nothing"),
        (["--rates", "1 gb"], "100mbit"),
        (["--tokens", "0"], "at least 1"),
        (["--compute-ms", "-1"], "above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_embedding.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(cluster: Any, ranks: int, rate: str, options: Any) -> list[dict[str, Any]]:
        if ranks == 8:
            raise KeyboardInterrupt
        return [{"ranks": ranks}]

    shown: list[Any] = []
    monkeypatch.setattr(bench_embedding, "_job", job)
    hosts = SimpleNamespace(rate=lambda rate: None)
    monkeypatch.setattr(bench_embedding.Cluster, "temporary", lambda *what: nullcontext(hosts))
    monkeypatch.setattr(bench_embedding.table, "show", lambda rows, console: shown.extend(rows))
    file = tmp_path / "rows.json"
    assert bench_embedding.main(["--ranks", "4,8", "--json", str(file)]) == bench_embedding.INTERRUPTED
    assert json.loads(file.read_text()) == shown == [{"ranks": 4}]


def test_what_was_measured_before_hosts_that_cannot_be_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a traceback, and the rows were lost."""

    def temporary(size: int, rate: str) -> Any:
        if size > 200:
            raise ClusterError("too many hosts")
        return nullcontext(SimpleNamespace(rate=lambda rate: None))

    monkeypatch.setattr(bench_embedding, "_job", lambda cluster, ranks, rate, options: [{"ranks": ranks}])
    monkeypatch.setattr(bench_embedding.Cluster, "temporary", temporary)
    monkeypatch.setattr(bench_embedding.table, "show", lambda rows, console: None)
    file = tmp_path / "rows.json"
    assert bench_embedding.main(["--ranks", "4,300", "--json", str(file)]) == 1
    assert json.loads(file.read_text()) == [{"ranks": 4}]
    assert bench_embedding.main(["--ranks", "300", "--json", str(file)]) == bench_embedding.NOTHING_MEASURED


@pytest.mark.ranks
def test_a_job_measures_every_method_and_writes_documented_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run_job(
        "mpi_scripts.bench_embedding",
        "--rows",
        "500",
        "--dim",
        "16",
        "--tokens",
        "60",
        "--dense",
        "100",
        "--rounds",
        "2",
        "--steps",
        "2",
        "--json",
        str(file),
        np=2,
        launcher="mpirun",
        timeout=120,
    )
    rows = {row["method"]: row for row in json.loads(file.read_text())}
    assert list(rows) == bench_embedding.DEFAULTS
    section = API.read_text().split("## Training with a large embedding")[1].split("\n## ")[0]
    documented = {
        key
        for line in section.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert documented <= set(rows["sharded"])
    assert rows["horovod"]["table_bytes"] is None
    assert rows["horovod"]["horovod_table_bytes"] == 60 * (4 * 16 + 8)
    # Half of the rows are a rank's own in the mean, not at each step: between none and all of them travel.
    for name, entry in (("sharded", 4), ("sharded-fp16", 2)):
        row = rows[name]
        assert 8 < row["table_bytes"] < 8 + row["unique_rows"] * (4 + 2 * entry * 16)
    assert rows["sharded"]["times_horovod"] > 0
