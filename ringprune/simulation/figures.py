"""The plots of the battery: loss against steps, and the best value against bytes sent."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ringprune.drawing import load_pyplot, save
from ringprune.simulation.methods import budget_name
from ringprune.simulation.rows import rows_of
from ringprune.simulation.study import Study

__all__ = ["CURVES", "FRONT", "draw"]

CURVES, FRONT = "accuracy_curves.png", "accuracy_front.png"

DECADE = 10
"""Largest over smallest loss from which on an axis is logarithmic: below that it would have one tick or none."""


def draw(studies: Sequence[Study], folder: Path) -> list[Path]:
    """Write the two plots of what is finished.

    Raises:
        DependencyError: matplotlib is missing.
    """
    load_pyplot()
    folder.mkdir(exist_ok=True)
    done = [study for study in studies if study.best is not None]
    return [_curves(done, folder / CURVES), _front(done, folder / FRONT)] if done else []


def _curves(studies: Sequence[Study], path: Path) -> Path:
    """A row of panels for each budget, a panel for each task, a line for each method at its best rate."""
    tasks = list(dict.fromkeys(study.cell.task for study in studies))
    budgets = sorted({study.cell.budget for study in studies} - {1.0}, reverse=True) or [1.0]
    figure, panels = _panels(len(budgets), len(tasks))
    colours = _colours(studies)
    for row, budget in enumerate(budgets):
        for column, task in enumerate(tasks):
            axes = panels[row][column]
            own = [s for s in studies if s.cell.task is task and s.cell.budget in (1.0, budget)]
            if not any(study.cell.budget == budget for study in own):
                axes.set_visible(False)  # nothing to hold against dense
                continue
            losses: list[float] = []
            for study in own:
                steps, loss = _mean_curve(study)
                losses += loss
                axes.plot(steps, loss, color=colours[study.cell.method.name], label=study.cell.method.name)
            scale = "log" if max(losses) > DECADE * min(losses) > 0 else "linear"
            title = f"{task.name}, {budget_name(budget)} of dense bytes"
            ylabel = "validation loss (nats)" if column == 0 else None
            axes.set(title=title, xlabel="step", ylabel=ylabel, yscale=scale)
            _tidy(axes)
    save(figure, path)
    return path


def _front(studies: Sequence[Study], path: Path) -> Path:
    """A panel for each task, a line for each method through its budgets; bars are standard errors."""
    tasks = list(dict.fromkeys(study.cell.task for study in studies))
    figure, panels = _panels(1, len(tasks))
    colours = _colours(studies)
    for axes, task in zip(panels[0], tasks, strict=True):
        own = [study for study in studies if study.cell.task is task]
        for name in dict.fromkeys(study.cell.method.name for study in own):
            rows = [row for s in own if s.cell.method.name == name for row in rows_of(s) if row["best"]]
            rows.sort(key=lambda row: row["bytes_per_step"])
            x = [row["bytes_per_step"] * own[0].cell.steps / 1e6 for row in rows]
            errors = [row["standard_error"] or 0.0 for row in rows]
            values = [row["value"] for row in rows]
            axes.errorbar(x, values, errors, color=colours[name], label=name, marker="o", markersize=4, capsize=2)
            if name == "dense":
                axes.axhline(values[0], color=colours[name], linewidth=0.8, linestyle=":")
        axes.set(title=task.name, xlabel="megabytes sent by each rank in the run", ylabel=task.metric, xscale="log")
        _tidy(axes)
    save(figure, path)
    return path


def _mean_curve(study: Study) -> tuple[list[int], list[float]]:
    assert study.best is not None
    curves: list[list[Any]] = [record["curve"][1:] for record in study.runs[study.best].records]
    return [point[0] for point in curves[0]], [fmean(c[i][2] for c in curves) for i in range(len(curves[0]))]


def _colours(studies: Sequence[Study]) -> Mapping[str, Any]:
    """A colour for each method, the same in all panels; dense is grey."""
    from matplotlib import colormaps

    names = sorted({study.cell.method.name for study in studies} - {"dense"})
    return {"dense": "#444444"} | {name: colormaps["tab10"](i % 10) for i, name in enumerate(names)}


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    size = (4.6 * columns, 3.6 * rows)
    figure, panels = load_pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, panels


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import NullFormatter

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
