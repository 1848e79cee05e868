"""Rows as a table for people or in a file for programs, and a bar that shows how far the measuring is."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ringprune.whole_file import write_json

__all__ = ["bar", "plain", "print_table", "show", "told_of_interrupt", "write_rows"]

Row = dict[str, Any]

INTERRUPTED = 130  # as shells say it

# heading, what stands below it
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("case", lambda row: str(row["case"])),
    ("entries", lambda row: f"{row['n']:,}"),
    ("density", lambda row: f"{100 * row['density']:g} %"),
    ("fused ms", lambda row: f"{row['fused_ms']:.3f}"),
    ("ns/entry", lambda row: f"{row['ns_per_element']:.3f}"),
    ("GB/s", lambda row: f"{row['gb_per_s']:.1f}"),
    ("/ pass 1", lambda row: f"{row['ratio_to_pass1']:.2f}"),
    ("/ memory", lambda row: f"{row['ratio_to_triad']:.2f}"),
    ("full ms", lambda row: f"{row['full_step_ms']:.3f}"),
    ("topk x", lambda row: f"{row['speedup_vs_torch_topk']:.1f}"),
    ("DGC x", lambda row: f"{row['speedup_vs_dgc_sampling']:.1f}"),
    ("exact", lambda row: "yes" if row["exact"] else "NO"),
    ("kept", lambda row: f"{row['kept']}/{row['of']}{'*' if row['disturbed'] else ''}"),
)

LEGEND = """\
fused     accumulate, score and select in one pass, with its share of the rms refresh; what was sent before leaves
          with it; 24 bytes per entry counted
/ pass 1  time of fused over the same pass without selection
/ memory  time of fused over that of moving its 24 bytes as fast as a triad moves its 16 (write-allocate counted)
full      fused, then pack and put: the whole local step of a bucket
topk x    how often full fits into the same step by torch.topk without temporaries
DGC x     how often fused fits into accumulate, score and DGC's sampled, approximate selection
exact     the positions are those of torch.topk, ties to the lowest
kept      times of fused that count, of all: the process waited for a CPU for less than 3 % of each; * some call has too
          few, and those that waited least are taken"""


def show(rows: Sequence[Row]) -> None:
    """Print the rows, what their columns mean, and what only some rows have."""
    print_table(COLUMNS, rows)
    memory = [row["triad_gb_per_s"] for row in rows]
    notes = [f"memory: {min(memory):.1f} to {max(memory):.1f} GB/s (a triad, in turns with the rest)"] if memory else []
    if disturbed := sum(row["disturbed"] for row in rows):
        notes.insert(0, f"* {disturbed} of {len(rows)} rows were disturbed by other jobs: figures not to be used\n")
    notes += [note for row in rows for note in _notes(row)]
    print("\n".join(["", LEGEND, "", *notes]))


def print_table(columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> None:
    """Print rows in columns of a heading and what stands below it."""
    headings, lines = [heading for heading, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    if not (sys.stdout.isatty() and _show_richly(headings, lines)):
        print(plain(headings, lines))


def _show_richly(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> bool:
    """Print the table with rich; False where it is not installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(box=SIMPLE_HEAD, padding=0)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        return False  # a line that wraps can be read; columns that are cut short cannot
    console.print(table)
    return True


def plain(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as text, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    rules = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in (headings, rules, *lines)
    )


def _notes(row: Row) -> Iterator[str]:
    """What a row has beyond its line in the table."""
    where = f"{row['case']}, {row['n']:,} at {100 * row['density']:g} %"
    if "step_overhead_ms" in row:
        parts = f"{row['wrapped_step_ms']:.1f} - {row['sgd_step_ms']:.1f} - {row['communicator_ms']:.1f}"
        yield (
            f"{where}: the wrapper adds {row['step_overhead_ms']:.1f} ms per step outside of communication "
            f"({parts}: wrapped step, plain SGD step, communicator; {row['steps_kept']}/{row['steps_of']} kept)"
        )
    if row.get("graph_us") is not None:
        yield f"{where}: {row['graph_us']:.0f} us in a CUDA graph"


@contextmanager
def bar(total: int) -> Iterator[Callable[[str, int, float], None]]:
    """A bar on standard error, where that is a terminal and tqdm is there.

    Yields:
        What moves it: a function of a case's name, how many came before it, and the share of it that is done.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda what, number, share: None
        return
    with tqdm(total=total, file=sys.stderr, disable=None, bar_format="{desc:32} {bar} {elapsed}") as shown:

        def move(what: str, number: int, share: float) -> None:
            shown.set_description_str(what, refresh=False)
            shown.update(number + min(share, 1.0) - shown.n)

        yield move


def told_of_interrupt(rows: Sequence[Row]) -> int:
    """Say what became of the rows of a command that was stopped; its status."""
    done = "these are the cases that were done" if rows else "before any case was done"
    print(f"stopped: {done}", file=sys.stderr)
    return INTERRUPTED


def write_rows(rows: Sequence[Row], to: str | None) -> None:
    """Rows for programs; where there are none a file of an earlier run stays. None is ever seen half written.

    Args:
        rows: what was measured.
        to: a file, ``-`` for standard output, or None for nowhere.
    """
    if rows or to in (None, "-"):
        write_json(rows, to)
    else:
        print(f"there are no rows: {to} is left as it is", file=sys.stderr)
