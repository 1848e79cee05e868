"""The picture of an answer: seconds of a step against the rate of the links, and how they compare with dense."""

from collections.abc import Mapping
from pathlib import Path

from ringprune.advise.rows import DENSE
from ringprune.drawing import load_pyplot, plain, save

__all__ = ["RATES", "draw"]

RATES = [10 ** (7 + exponent / 12) for exponent in range(49)]
"""bit/s: 10 Mbit/s to 100 Gbit/s."""

SPEEDUPS = (0.4, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
"""Marked beside the lower panel; it ends there, for whoever gains more needs no picture to decide."""


def draw(curves: Mapping[str, list[float]], compute: float, rate: float, title: str, path: Path) -> None:
    """Draw each method at :data:`RATES`: seconds above, steps in the time of a dense one below.

    All scales are logarithmic. Seconds span decades, so it is the lower panel that shows from where on nothing pays.

    Args:
        curves: seconds, by method.
        compute: seconds of compute alone.
        rate: that was asked about, bit/s; marked where it is in the picture.
        title: what stands above.
        path: file to write.

    Raises:
        DependencyError: matplotlib is missing.
    """
    pyplot = load_pyplot()

    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(7.5, 6.5), height_ratios=(3, 2), layout="constrained"
    )
    rates = [bits / 1e9 for bits in RATES]
    for name, seconds in curves.items():
        style = {"color": "black", "linewidth": 2.5} if name == DENSE else {}
        (line,) = above.plot(rates, [1e3 * s for s in seconds], label=name, **style)
        speedups = [dense / s for dense, s in zip(curves[DENSE], seconds, strict=True)]
        below.plot(rates, speedups, color=line.get_color(), linewidth=line.get_linewidth())
    above.axhline(1e3 * compute, color="grey", linestyle=":", label="compute alone")
    for axes in (above, below):
        if RATES[0] <= rate <= RATES[-1]:
            axes.axvline(rate / 1e9, color="grey", linestyle="--", linewidth=1)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.25, which="both")
    above.set(ylabel="ms per step, predicted")
    above.set_title(plain(title), fontsize=10)
    above.yaxis.set_major_formatter("{x:g}")
    above.legend(frameon=False, fontsize=8)
    below.set(
        xlabel="rate of the links, Gbit/s",
        ylabel="steps in the time of a dense one",
        ylim=SPEEDUPS[:: len(SPEEDUPS) - 1],
    )
    below.set_yticks(SPEEDUPS, labels=[f"{speedup:g}" for speedup in SPEEDUPS])
    below.set_yticks([], minor=True)
    below.xaxis.set_major_formatter("{x:g}")
    save(figure, path)
