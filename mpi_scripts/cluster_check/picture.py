"""The picture of a check: bandwidth and latency between hosts, and what selection costs beside the network."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringprune.drawing import load_pyplot, save

from .links import Pair
from .report import Report

__all__ = ["draw"]

MOST_NUMBERS = 12  # places up to which each cell carries its number


def draw(report: Report, path: Path) -> None:
    """Write the picture; its format follows the file's name.

    Raises:
        DependencyError: matplotlib is missing.
    """
    figure, panels = load_pyplot().subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    _matrix(panels[0], report, "bandwidth, Mbit/s (row sends to column)", lambda p: p.bits_per_second / 1e6, "viridis")
    _matrix(panels[1], report, "latency, microseconds", lambda p: 1e6 * p.seconds, "viridis_r")
    _costs(panels[2], report)
    save(figure, path)


def _matrix(axes: Any, report: Report, title: str, value: Callable[[Pair], float], colours: str) -> None:
    size = len(report.places)
    cells = [[math.nan] * size for _ in range(size)]
    for (i, j), pair in report.links.pairs.items():
        cells[i][j] = value(pair)
    axes.set(title=title, xticks=range(size), yticks=range(size))
    axes.set_xticklabels(report.places, rotation=45 if size > 4 else 0)
    axes.set_yticklabels(report.places)
    if not report.links.pairs:
        return
    image = axes.imshow(cells, cmap=colours, vmin=0)
    top = max(value(pair) for pair in report.links.pairs.values())
    for (i, j), pair in report.links.pairs.items() if size <= MOST_NUMBERS else ():
        dark = (value(pair) < 0.6 * top) != colours.endswith("_r")
        axes.text(j, i, f"{value(pair):.4g}", ha="center", va="center", color="white" if dark else "black", fontsize=9)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _costs(axes: Any, report: Report) -> None:
    bars = {"select": max(report.selection.values()), **report.network_seconds}
    names = {"select": "select\n(slowest host)", "dense": "send all", "packed": "send selected"}
    drawn = axes.bar([names[name] for name in bars], [1e3 * seconds for seconds in bars.values()])
    axes.bar_label(drawn, fmt="%.3g")
    axes.set(
        title=f"{report.entries / 1e6:g} million weights at {100 * report.density:g} %", ylabel="ms (log)", yscale="log"
    )
    axes.margins(y=0.15)
