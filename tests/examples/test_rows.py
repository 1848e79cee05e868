"""From journals to rows, table and figures: the schema others rely on, and the arithmetic of the averages."""

import json
from pathlib import Path
from typing import Any

import pytest
from account import horovod_stats, mean_over_ranks
from demo import write
from figures import draw
from rich.console import Console
from rows import row_of, table_of

KEYS = {
    "task",
    "method",
    "metric",
    "value",
    "steps_per_second",
    "bytes_per_step",
    "wire_ratio",
    "steady_wire_ratio",
    "value_ratio",
    "density",
    "realised_density",
    "seed",
}


def record(task: str = "digits", policy: str = "horovod-fp32", seed: int = 1, value: float = 0.98) -> dict[str, Any]:
    steps = list(range(10, 110, 10))
    return {
        "task": task,
        "policy": policy,
        "ranks": 2,
        "seed": seed,
        "learning_rate": 0.1,
        "batch_size": 32,
        "metric": "validation accuracy" if task == "digits" else "validation loss",
        "value": value,
        "steps": 100,
        "steps_per_second": 50.0,
        "stats": horovod_stats(1000, 2 if policy == "horovod-fp16" else 4, ranks=2, steps=100),
        "curve": {"steps": steps, "bytes": [4000.0 * step for step in steps], "loss": [1 / step for step in steps]},
        "validation": {"steps": [100], "bytes": [4e5], "value": [value]},
    }


def test_plain_horovod_bytes_follow_the_definition() -> None:
    stats = horovod_stats(1000, 4, ranks=4, steps=10)
    assert stats["bytes_sent"] == stats["dense_equivalent_bytes"] == 10 * 2 * 3 / 4 * 4 * 1000
    half = horovod_stats(1000, 2, ranks=4, steps=10)
    assert half["bytes_sent"] * 2 == stats["bytes_sent"]
    assert half["wire_ratio"] == 2
    assert horovod_stats(1000, 2, ranks=1, steps=10)["bytes_sent"] == 0


def test_mean_over_ranks() -> None:
    one = {
        "steps": 5,
        "bytes_sent": 100.0,
        "dense_equivalent_bytes": 800.0,
        "wire_ratio": 8.0,
        "seconds": {"pack": 1.0},
    }
    two = {
        "steps": 5,
        "bytes_sent": 300.0,
        "dense_equivalent_bytes": 800.0,
        "wire_ratio": 800 / 300,
        "seconds": {"pack": 3.0, "score": 1.0},
    }
    mean = mean_over_ranks([one, two])
    assert mean["steps"] == 5
    assert mean["bytes_sent"] == 200
    assert mean["wire_ratio"] == pytest.approx(800 / 200), "of the mean bytes, not the mean of the ratios"
    assert mean["seconds"] == {"pack": 2.0, "score": 0.5}


def test_rows_have_the_agreed_keys() -> None:
    row = row_of(record(policy="horovod-fp16"))
    assert set(row) >= KEYS
    assert row["method"] == "horovod-fp16"
    assert row["bytes_per_step"] == 2000
    assert row_of(record(policy="iwp"))["method"] == "ringprune:iwp"
    parts = sum(row[f"bytes_{part}_per_step"] for part in ("values", "indices", "dense", "headers"))
    assert parts == row["bytes_per_step"]


def test_table_of_one_seed_and_of_three() -> None:
    console = Console(width=80, record=True)
    console.print(table_of([row_of(record()), row_of(record(policy="iwp"))]))
    console.print(table_of([row_of(record("charlm", value=1.5))]))
    assert "…" not in console.export_text(clear=False), "fits a narrow terminal"
    console.width = 100
    console.print(table_of([row_of(record(seed=seed, value=0.97 + seed / 100)) for seed in (1, 2, 3)]))
    text = console.export_text()
    assert "98.00 %" in text
    assert "1.500" in text
    assert "99.00 ± 0.58 %" in text


def test_results_and_figures_are_written(tmp_path: Path) -> None:
    records = [record(task, policy) for task in ("digits", "charlm") for policy in ("horovod-fp32", "iwp")]
    write(tmp_path / "results.json", [row_of(one) for one in records])
    assert len(json.loads((tmp_path / "results.json").read_text())) == 4
    paths = draw(records, tmp_path)
    assert [path.name for path in paths] == ["loss_vs_steps.png", "loss_vs_bytes.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "loss_vs_bytes.png",
        "loss_vs_steps.png",
        "results.json",
    ]
