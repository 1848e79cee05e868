"""The rows for people."""

from collections.abc import Sequence
from typing import Any

from exchanges.table import print_rows
from rich.console import Console

__all__ = ["show"]

COLUMNS = (
    ("rate", "rate", "", 1),
    ("method", "method", "", 1),
    ("ms", "seconds", ",.1f", 1e3),
    ("compute", "compute_seconds", ",.1f", 1e3),
    ("network", "communication_seconds", ",.1f", 1e3),
    ("bound", "bound_seconds", ",.1f", 1e3),
    ("over", "over_bound", "+.1%", 1),
    ("overlap", "overlap", ".2f", 1),
    ("gain", "gain_over_horovod", "+.1%", 1),
    ("+-", "gain_error", ".1%", 1),
    ("over best", "over_best", "+.1%", 1),
    ("+- ", "over_best_error", ".1%", 1),
    ("nic MB", "nic_bytes_per_rank", ",.1f", 1e-6),
    ("foreign", "foreign_cores", ".1f", 1),
)

LEGEND = """\
ms         from the beginning of an iteration to that of the next; median over the rounds, the slowest rank's
compute    of an iteration that exchanges nothing; network: of an exchange with nothing else to do
bound      the longer of these two; over: how much longer the iteration is
overlap    0: one after the other; 1: the shorter is hidden by the longer
gain       iterations per second against plain Horovod in the same round; median, and its standard error
over best  of auto: how much longer than the fastest policy beside it, round by round; and its standard error
foreign    cores that other processes kept busy: above a few tenths believe the bytes, not the times"""


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table for each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        these = [row for row in rows if row["model"] == model]
        first = these[0]
        title = (
            f"{model}: {first['entries']:,} entries, {first['ranks']} ranks, times divided by {first['time_scale']:g}"
        )
        print_rows(COLUMNS, these, title, console)
        console.print(f"{model}: {first['provenance']}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(LEGEND, markup=False, highlight=False, soft_wrap=True)
