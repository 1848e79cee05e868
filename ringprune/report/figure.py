"""The picture of runs: bytes of a step over the steps, and what the loop noted over the bytes sent."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ringprune.drawing import load_pyplot, plain, save
from ringprune.report.rows import sent
from ringprune.stats_log import Line

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
    per_step, *others = panels[0]
    for run, lines in runs.items():
        so_far = [1e-6 * number for number in sent(lines)]
        steps, megabytes = _per_step(lines, so_far)
        per_step.plot(steps, megabytes, drawstyle="steps-pre", label=plain(run))
        for axes, name in zip(others, noted, strict=True):
            known = [i for i, line in enumerate(lines) if line["values"].get(name) is not None]
            axes.plot([so_far[i] for i in known], [lines[i]["values"][name] for i in known], label=plain(run))
    per_step.set(xlabel="steps", ylabel="MB per step, this rank")
    if any(any(y > 0 for y in line.get_ydata()) for line in per_step.lines):  # a single rank sends nothing
        per_step.set(yscale="log")
    for axes, name in zip(others, noted, strict=True):
        axes.set(xlabel="MB sent by this rank", ylabel=plain(name))
        if any(any(x > 0 for x in line.get_xdata()) for line in axes.lines):
            axes.set(xscale="log")
    for axis in [a for a in (per_step.yaxis, *(axes.xaxis for axes in others)) if a.get_scale() == "log"]:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for axes in panels[0]:
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, path)


def _per_step(lines: Sequence[Line], so_far: Sequence[float]) -> tuple[list[int], list[float]]:
    """Where each interval ends, and the megabytes of one of its steps."""
    calls = [line["calls"] for line in lines]
    apart = [(i, j) for i, j in pairwise(range(len(lines))) if calls[j] > calls[i]]
    return [calls[j] for _, j in apart], [(so_far[j] - so_far[i]) / (calls[j] - calls[i]) for i, j in apart]
