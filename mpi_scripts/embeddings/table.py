"""The rows for people."""

from collections.abc import Sequence
from typing import Any

from exchanges.table import print_rows
from rich.console import Console

__all__ = ["show"]

COLUMNS = (
    ("rate", "rate", "", 1),
    ("ranks", "ranks", "", 1),
    ("method", "method", "", 1),
    ("ms", "seconds", ",.1f", 1e3),
    ("words/s", "words_per_second", ",.0f", 1),
    ("x Horovod", "times_horovod", ".2f", 1),
    ("+-", "times_error", ".2f", 1),
    ("nic MB", "nic_bytes_per_rank", ",.2f", 1e-6),
    ("table MB", "table_bytes", ",.2f", 1e-6),
    ("x fewer", "table_ratio", ".1f", 1),
    ("foreign", "foreign_cores", ".1f", 1),
)

LEGEND = """\
ms         a step; median over the rounds, the slowest rank's. words/s: of all ranks together
x Horovod  words per second over plain Horovod's in the same round; median, and its standard error
nic MB     what a host sent per step, by the kernel's counters; table MB: of it for the table, by our own
x fewer    bytes of the table against those of Horovod's allgather, by formula: (P - 1) tokens (4 dim + 8)
foreign    cores that other processes kept busy: above a few tenths believe the bytes, not the times"""


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """One table."""
    first = rows[0]
    title = (
        f"table of {first['rows']:,} x {first['dim']}, {first['tokens']:,} tokens per rank and step: "
        f"{first['touched']:.1%} of the rows, c = {first['tokens_per_row']:.2f} tokens per row; "
        f"{first['dense']:,} other entries, {first['compute_ms']:g} ms of compute, "
        f"times divided by {first['time_scale']:g}"
    )
    print_rows(COLUMNS, rows, title, console)
    console.print(LEGEND, markup=False, highlight=False, soft_wrap=True)
