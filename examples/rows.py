"""From the journals of single runs to rows, and from rows to the table people read."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["method_of", "row_of", "table_of"]

Row = dict[str, Any]


def method_of(policy: str) -> str:
    """What a ``--policy`` is called in results: ours carry our name."""
    return policy if policy.startswith("horovod") else f"ringprune:{policy}"


def row_of(record: dict[str, Any]) -> Row:
    """One row of ``results.json`` from what a training script wrote with ``--log-file``."""
    stats = record["stats"]
    steps = stats["steps"]
    row = {"task": record["task"], "method": method_of(record["policy"])}
    row |= {key: record[key] for key in ("metric", "value", "steps_per_second")}
    row["bytes_per_step"] = stats["bytes_sent"] / steps
    for part in ("values", "indices", "dense", "headers"):
        row[f"bytes_{part}_per_step"] = stats[f"bytes_{part}"] / steps
    row |= {
        key: stats[key] for key in ("wire_ratio", "steady_wire_ratio", "value_ratio", "density", "realised_density")
    }
    return row | {key: record[key] for key in ("seed", "ranks", "steps", "batch_size", "learning_rate")}


def table_of(rows: Sequence[Row]) -> Table:
    """The rows of one task, a line per method; over several seeds the mean and its standard error."""
    first = rows[0]
    title = f"{first['task']}: {first['metric']} after {first['steps']} steps on {first['ranks']} ranks"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for name in (first["metric"].split()[-1], "steps/s", "kB per\nstep", "values", "indices", "dense\npart"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("wire\nratio", "after\nwarm-up", "value\nratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for method in dict.fromkeys(row["method"] for row in rows):
        table.add_row(method, *_cells([row for row in rows if row["method"] == method]))
    return table


def _cells(group: Sequence[Row]) -> list[str]:
    accuracy = group[0]["metric"].endswith("accuracy")
    values = [100 * row["value"] if accuracy else row["value"] for row in group]
    kilobytes = ("bytes_per_step", "bytes_values_per_step", "bytes_indices_per_step", "bytes_dense_per_step")
    ratios = ("wire_ratio", "steady_wire_ratio", "value_ratio")
    return [
        _with_error(values, 2) + " %" if accuracy else _with_error(values, 3),
        _with_error([row["steps_per_second"] for row in group], 1),
        *(_short(mean(row[key] for row in group) / 1e3) for key in kilobytes),
        *(f"{mean(row[key] for row in group):.1f}" for key in ratios),
    ]


def _short(number: float) -> str:
    if number == 0:
        return "-"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _with_error(values: Sequence[float], digits: int) -> str:
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"
