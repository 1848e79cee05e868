"""All runs of a store as a table: the log of what was tried, losers included."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from ringprune.simulation.rows import standard_error
from ringprune.simulation.tasks import TASKS

__all__ = ["log", "log_page", "markdown"]

Record = dict[str, Any]

HEADINGS = ("task", "ranks", "steps", "method", "rate", "value", "seeds", "wire ratio")


def log(records: Iterable[Record], *, probes: bool = False) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and lines: by task, ranks and steps, best first; seeds of the same run together.

    Runs of an older version of a task are marked with it. Without ``probes``, runs of less than a quarter of a task's
    steps are left out: the battery makes those to find out how many bytes a method sends.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record["task"] in TASKS and (probes or record["steps"] >= TASKS[record["task"]].steps // 4):
            same = [record[key] for key in ("task", "ranks", "steps", "version", "policy", "learning_rate")]
            groups[tuple(same)].append(record)
    return HEADINGS, [_line(group) for group in sorted(groups.values(), key=_order)]


def log_page(records: Iterable[Record], *, probes: bool = False) -> str:
    """:func:`log` in Markdown, methods as code."""
    headings, lines = log(records, probes=probes)
    method = headings.index("method")
    return markdown(headings, [[*line[:method], f"`{line[method]}`", *line[method + 1 :]] for line in lines])


def _order(group: Sequence[Record]) -> tuple[Any, ...]:
    first, task = group[0], TASKS[group[0]["task"]]
    mean = _mean(group)
    value = float("inf") if mean is None else -mean if task.higher_is_better else mean
    return list(TASKS).index(first["task"]), first["ranks"], first["steps"], first["version"], value, first["spec"]


def _mean(group: Sequence[Record]) -> float | None:
    values = [record["value"] for record in group]
    return None if None in values else fmean(values)


def _line(group: Sequence[Record]) -> list[str]:
    first, mean, task = group[0], _mean(group), TASKS[group[0]["task"]]
    digits = 2 if task.higher_is_better else 4
    value = "diverged" if mean is None else f"{mean:.{digits}f}"
    error = None if mean is None else standard_error([record["value"] for record in group])
    old = "" if first["version"].partition("-")[0] == str(task.version) else f" (version {first['version']})"
    sent, dense = fmean(r["bytes_sent"] for r in group), fmean(r["dense_bytes"] for r in group)
    return [
        first["task"] + old,
        str(first["ranks"]),
        str(first["steps"]),
        first["spec"],
        f"{first['learning_rate']:g}",
        value + ("" if error is None else f" ± {error:.{digits}f}"),
        str(len(group)),
        "" if mean is None or not sent else f"{dense / sent:.1f}",
    ]


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
