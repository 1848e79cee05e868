"""Drawing with matplotlib, which is optional: loading it, and writing a plot."""

from pathlib import Path
from typing import Any

from ringprune.errors import DependencyError

__all__ = ["load_pyplot", "plain", "save"]


def plain(text: str) -> str:
    """A name that is not ours, to be drawn as it is: dollars are none of a formula, and no first ``_`` hides it."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, for a machine without a display.

    Raises:
        DependencyError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DependencyError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the file's name ends in, and let go of it."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
