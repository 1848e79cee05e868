"""The rows as a table for people, with what its columns mean and what to think of them."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["Column", "footer", "print_rows", "print_whole", "show"]

Row = dict[str, Any]
NONE = "-"


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: NONE if row[key] is None else format(row[key] * scale, form)


# heading, what stands below it
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("method", lambda row: str(row["method"])),
    ("over", lambda row: str(row["communicator"])),
    ("ranks", lambda row: str(row["ranks"])),
    ("rate", lambda row: str(row["rate"])),
    ("seconds", _number("seconds", ".3f")),
    ("spread", _number("spread", ".0%")),
    ("foreign", _number("foreign_cores", ".1f")),
    ("floor", _number("seconds_floor", ".3f")),
    ("compute", _number("compute_seconds", ".3f")),
    ("alone", _number("communication_seconds", ".3f")),
    ("nic MB", _number("nic_bytes_per_rank", ",.2f", 1e-6)),
    ("counted MB", _number("counted_bytes_per_rank", ",.2f", 1e-6)),
    ("wire x", _number("wire_ratio", ",.1f")),
    ("value x", _number("value_ratio", ",.1f")),
    ("density", _number("realised_density", ".3%")),
)

LEGEND = """\
seconds    median over the steps of the slowest rank's: selection, packing and communication of all gradients, while
           the backward pass hands them out; spread: (largest - smallest) / median
foreign    cores that other processes kept busy meanwhile (other virtual machines too): above a few tenths believe the
           bytes, not the seconds
floor      what a link of this rate needs for the counted bytes with their packets' headers, and for nothing else
compute    the part outside of communication, by RingPrune's own stages, mean over ranks; others do not tell
alone      the messages of such steps sent once more, in the same order, with nothing to compute in between
nic MB     sent per rank and step, by the kernel's counters of the interfaces named below
counted MB the same by the method's own account; dense allreduces: 2 (P-1)/P of the gradients
wire x     dense float32 bytes over the counted bytes; value x: over those of values alone"""


def show(rows: Sequence[Row], console: Console) -> None:
    """A table for each model, then the legend and the footer."""
    for model in dict.fromkeys(row["model"] for row in rows):
        these = [row for row in rows if row["model"] == model]
        sizes = dict.fromkeys((row["entries"], row["tensors"]) for row in these)
        title = f"{model}: " + "; ".join(f"{entries:,} entries in {tensors} tensors" for entries, tensors in sizes)
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
        for heading, _ in COLUMNS:
            left = heading in ("method", "over")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for row in these:
            table.add_row(*(cell(row) for _, cell in COLUMNS))
        print_whole(table, console)
    console.print(LEGEND, markup=False, highlight=False, soft_wrap=True)
    console.print("\n" + "\n".join(footer(rows)), markup=False, highlight=False, soft_wrap=True)


Column = tuple[str, str, str, float]
"""Heading, key of the row, format of its value, and what that is multiplied by."""

LEFT = ("rate", "method")


def print_rows(columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    """Rows under a title, text to the left and numbers to the right."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for heading, *_ in columns:
        table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_written(row[key], form, scale) for _, key, form, scale in columns))
    print_whole(table, console)


def _written(value: Any, form: str, scale: float) -> str:
    if value is None:
        return NONE
    return format(value * scale, form) if form else str(value)


def print_whole(table: Table, console: Console) -> None:
    """On a narrow screen lines wrap: that can be read, columns that are cut short cannot."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
    console.width = width


def footer(rows: Sequence[Row]) -> list[str]:
    """What has to be known before the figures are believed."""
    jobs = [row for row in rows if row["seconds"] is not None]
    lines = []
    if jobs:
        loads = [row["load_before"] for row in jobs]
        cores = jobs[0]["cores"]
        ranks = max((row["ranks"] for row in jobs if row["emulated"] or row["hosts"] == 1), default=0)
        lines.append(f"load average before the jobs: {min(loads):.1f} to {max(loads):.1f}, on {cores} cores")
        if ranks > cores:
            lines.append(
                f"{ranks} ranks share the {cores} cores of this machine: seconds and compute are inflated, by "
                f"{ranks / cores:g} times and more where all ranks compute at once or spin while they wait"
            )
        lines.append(
            f"interfaces read: {', '.join(sorted({name for row in jobs for name in row['interfaces']})) or NONE}"
        )
    if any(row["hosts"] == 1 for row in jobs):
        lines.append("all ranks on one host: the counters are those of lo, and shared memory passes it by")
    if whole := {(row["entries"], row["sliced_from"]) for row in rows if row.get("sliced_from")}:
        kept = ", ".join(f"{entries:,} of {total:,} entries" for entries, total in sorted(whole))
        lines.append(f"simulated: the first rows of every tensor, {kept}; ratios are close to the whole model's")
    return lines
