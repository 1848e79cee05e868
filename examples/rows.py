"""From the journals of single runs to rows, and from rows to the table people read."""

from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

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


def table_of(rows: Iterable[Row]) -> Table:
    """A line per task and method; over several seeds the mean and its standard error."""
    table = Table(title="Side by side; bytes are per rank and step, in kB, warm-up included", title_justify="left")
    table.add_column("task")
    table.add_column("method", no_wrap=True)
    table.add_column("validation")
    for name in ("steps/s", "kB sent", "values", "indices", "dense part", "wire ratio", "after warm-up", "value ratio"):
        table.add_column(name, justify="right")
    task = None
    for group in _grouped(rows):
        first = group[0]
        if task not in (None, first["task"]):
            table.add_section()
        cells = [first["task"] if first["task"] != task else "", first["method"], _metric(group)]
        table.add_row(*cells, *_numbers(group))
        task = first["task"]
    return table


def _grouped(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    return list(groups.values())


def _metric(group: Sequence[Row]) -> str:
    values = [row["value"] for row in group]
    if group[0]["metric"].endswith("accuracy"):
        return f"accuracy {_with_error([100 * value for value in values], 2)} %"
    return f"loss {_with_error(values, 3)}"


def _numbers(group: Sequence[Row]) -> list[str]:
    kilobytes = ("bytes_per_step", "bytes_values_per_step", "bytes_indices_per_step", "bytes_dense_per_step")
    return [
        _with_error([row["steps_per_second"] for row in group], 1),
        *(f"{mean(row[key] for row in group) / 1e3:,.1f}" for key in kilobytes),
        *(f"{mean(row[key] for row in group):.1f}" for key in ("wire_ratio", "steady_wire_ratio", "value_ratio")),
    ]


def _with_error(values: Sequence[float], digits: int) -> str:
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"
