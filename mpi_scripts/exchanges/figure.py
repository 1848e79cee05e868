"""The rows as a figure: seconds against the rate of the links, bytes against the number of ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exchanges.rows import AS_IT_IS, bits_per_second
from exchanges.simulated import RATE
from ringprune.drawing import load_pyplot, save

__all__ = ["draw"]

Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the figure: a line of panels per model, a line per method; what the rows do not have is left out.

    Raises:
        DependencyError: matplotlib is missing.
    """
    pyplot = load_pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    timed = [row for row in rows if row["seconds"] is not None]
    panels = ([_against_rate] if timed else []) + [_against_ranks]
    figure, grid = pyplot.subplots(
        len(models),
        len(panels),
        figsize=(6.4 * len(panels), 4.4 * len(models)),
        squeeze=False,
        layout="constrained",
    )
    for line, model in zip(grid, models, strict=True):
        for axes, panel in zip(line, panels, strict=True):
            panel(axes, [row for row in rows if row["model"] == model])
            axes.set_title(model)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        line[-1].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)


def _against_rate(axes: Any, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["seconds"] is not None]
    if not rows:
        return  # only bytes of this model are known
    ranks = max(row["ranks"] for row in rows)
    rows = [row for row in rows if row["ranks"] == ranks]
    rates = sorted({row["rate"] for row in rows}, key=_speed)
    if len(rates) == 1:
        _bars(axes, rows, lambda row: row["seconds"], f"seconds per exchange at {rates[0]}, {ranks} ranks")
        return
    _lines(axes, rows, lambda row: rates.index(row["rate"]), lambda row: row["seconds"])
    axes.set_xticks(range(len(rates)), rates)
    axes.set(ylabel="seconds per exchange", xlabel=f"rate of the links, {ranks} ranks")


def _against_ranks(axes: Any, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if row["rate"] == RATE] or [row for row in rows if row["nic_bytes_per_rank"]] or rows
    of = (
        "counted_bytes_per_rank"
        if shown[0]["rate"] == RATE or not shown[0]["nic_bytes_per_rank"]
        else "nic_bytes_per_rank"
    )
    ranks, what = sorted({row["ranks"] for row in shown}), f"MB sent per rank ({of.split('_')[0]})"
    shown = [row for row in shown if row[of]]
    if len(ranks) == 1:
        _bars(axes, shown, lambda row: row[of] / 1e6, f"{what}, {ranks[0]} ranks")
        return
    _lines(axes, shown, lambda row: row["ranks"], lambda row: row[of] / 1e6)
    axes.set(xscale="log", xlabel="ranks", ylabel=what)
    axes.set_xticks(ranks, map(str, ranks))
    axes.minorticks_off()


def _lines(axes: Any, rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> None:
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        points = sorted({x(row): y(row) for row in rows if row["method"] == method}.items())
        dashes = "--" if method.endswith("-ring") else "-"
        axes.plot(*zip(*points, strict=True), dashes, marker="o", markersize=4, label=method, color=f"C{number % 10}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _bars(axes: Any, rows: Sequence[Row], x: Callable[[Row], float], what: str) -> None:
    """Where there is nothing to draw a line against."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["method"]] = x(row)
    for number, (method, value) in enumerate(found.items()):
        axes.text(value, number, f" {value:.3g}", va="center", fontsize="small")
        axes.barh(number, value, label=method, color=f"C{number % 10}")
    axes.set(xscale="log", xlabel=what, yticks=[])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()


def _speed(rate: str) -> float:
    return 0.0 if rate == AS_IT_IS else bits_per_second(rate) or float("inf")
