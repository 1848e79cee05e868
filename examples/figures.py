"""The curves of the demonstration: loss against steps, and against bytes sent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from rows import method_of

from ringprune.drawing import load_pyplot, save

__all__ = ["draw"]

TITLES = {"digits": "Handwritten digits, convolutional network", "charlm": "Python source text, character LSTM"}

COLOURS = {
    "horovod-fp32": "#444444",
    "horovod-fp16": "#d98200",
    "ringprune:iwp": "#0b6fb8",
    "ringprune:recommended": "#2a9d4a",
}
STYLES = {"horovod-fp16": (0, (4, 2))}


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write ``loss_vs_steps.png`` and ``loss_vs_bytes.png``: a panel per task, a line per method, mean over seeds."""
    return [
        _figure(records, "steps", "step", folder / "loss_vs_steps.png"),
        _figure(records, "bytes", "megabytes sent by each rank so far (log scale)", folder / "loss_vs_bytes.png"),
    ]


def _figure(records: Sequence[dict[str, Any]], against: str, label: str, path: Path) -> Path:
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure, panels = load_pyplot().subplots(
        1, len(tasks), figsize=(5.6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        _panel(axes, [record for record in records if record["task"] == task], against)
        axes.set(title=TITLES.get(task, task), xlabel=label)
    panels[0][0].set_ylabel("training loss (mean over ranks)")
    save(figure, path)
    return path


def _panel(axes: Any, records: Sequence[dict[str, Any]], against: str) -> None:
    from matplotlib.ticker import NullFormatter

    for policy in dict.fromkeys(record["policy"] for record in records):
        curves = [record["curve"] for record in records if record["policy"] == policy]
        x = numpy.mean([curve[against] for curve in curves], axis=0)
        y = _smooth(numpy.mean([curve["loss"] for curve in curves], axis=0))
        method = method_of(policy)
        axes.plot(
            x / (1e6 if against == "bytes" else 1),
            y,
            label=method,
            color=COLOURS.get(method),
            linestyle=STYLES.get(method, "-"),
            linewidth=1.8,
        )
    low, high = axes.dataLim.intervaly
    axes.set_yscale("log" if high > 20 * low > 0 else "linear")
    axes.set_xscale("log" if against == "bytes" else "linear")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left" if against == "bytes" else "upper right")  # where no curve goes


def _smooth(values: numpy.ndarray, width: int = 5) -> numpy.ndarray:
    """Mean over ``width`` neighbouring points, fewer at the ends."""
    half = width // 2
    return numpy.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
