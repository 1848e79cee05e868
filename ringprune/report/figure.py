"""The picture of runs: bytes of a step over the steps, and what the loop noted over the bytes sent."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ringprune.drawing import load_pyplot, save
from ringprune.report.rows import Line

__all__ = ["draw"]


def draw(runs: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Draw one panel of bytes per step, and one for each value that some run noted.

    Raises:
        DependencyError: matplotlib is missing.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    noted = list(dict.fromkeys(name for lines in runs.values() for line in lines for name in line["values"]))
    figure, panels = pyplot.subplots(1, 1 + len(noted), figsize=(5 * (1 + len(noted)), 4), squeeze=False)
    sent, *others = panels[0]
    for run, lines in runs.items():
        steps, megabytes = _per_step(lines)
        sent.plot(steps, megabytes, drawstyle="steps-pre", label=run)
        for axes, name in zip(others, noted, strict=True):
            known = [line for line in lines if name in line["values"]]
            axes.plot([_sent(line) for line in known], [line["values"][name] for line in known], label=run)
    sent.set(xlabel="steps", ylabel="MB per step, this rank", yscale="log")
    for axes, name in zip(others, noted, strict=True):
        axes.set(xlabel="MB sent by this rank", ylabel=name, xscale="log")
    for axis in [sent.yaxis, *(axes.xaxis for axes in others)]:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for axes in panels[0]:
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, path)


def _sent(line: Line) -> float:
    return float(line["stats"].get("bytes_sent", 0.0)) / 1e6


def _per_step(lines: Sequence[Line]) -> tuple[list[int], list[float]]:
    """Where each interval ends, and the megabytes of one of its steps."""
    apart = [(one, other) for one, other in pairwise(lines) if other["calls"] > one["calls"]]
    megabytes = [(_sent(other) - _sent(one)) / (other["calls"] - one["calls"]) for one, other in apart]
    return [other["calls"] for _, other in apart], megabytes
