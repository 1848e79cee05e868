"""The picture of an answer: seconds of a step against the rate of the links."""

from collections.abc import Mapping
from pathlib import Path

from ringprune.advise.rows import DENSE
from ringprune.errors import ConfigurationError, DependencyError

__all__ = ["RATES", "draw"]

RATES = [10 ** (7 + exponent / 12) for exponent in range(49)]
"""bit/s: 10 Mbit/s to 100 Gbit/s."""


def draw(curves: Mapping[str, list[float]], compute: float, rate: float, title: str, path: Path) -> None:
    """Draw seconds of each method at :data:`RATES`, both scales logarithmic.

    Args:
        curves: seconds, by method.
        compute: seconds of compute alone.
        rate: that was asked about, bit/s; marked where it is in the picture.
        title: what stands above.
        path: file to write.

    Raises:
        DependencyError: matplotlib is missing.
        ConfigurationError: the file's name ends in no format that it writes.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DependencyError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, seconds in curves.items():
        (line,) = axes.plot([bits / 1e9 for bits in RATES], [1e3 * s for s in seconds], label=name)
        if name == DENSE:
            line.set(color="black", linewidth=2.5)
    axes.axhline(1e3 * compute, color="grey", linestyle=":", label="compute alone")
    if RATES[0] <= rate <= RATES[-1]:
        axes.axvline(rate / 1e9, color="grey", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rate of the links, Gbit/s", ylabel="ms per step, predicted")
    axes.set_title(title, fontsize=10)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # the name ends in no format that matplotlib knows
        raise ConfigurationError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)
