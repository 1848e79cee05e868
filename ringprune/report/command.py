"""``ringprune report``: its options, and what it prints and writes."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ringprune.bench.table import print_table, write_rows
from ringprune.errors import RingPruneError
from ringprune.readers import picture, target
from ringprune.report.figure import draw
from ringprune.report.rows import Row, row_of
from ringprune.stats_log import read

__all__ = ["add_command"]

DESCRIPTION = """\
Says what runs have sent, from the files that ringprune.StatsLog wrote while they trained: one row for each file. Rates
are those between a file's first line and its last.
"""
EPILOG = """\
examples:
  ringprune report run.jsonl
  ringprune report dense.jsonl iwp.jsonl --plot runs.png
  ringprune report run.jsonl --json -

in the training script, on rank 0:
  with ringprune.StatsLog("run.jsonl", optimizer, every=50) as log:
      for batch in batches:
          ...
          optimizer.step()
          log.step(loss=loss)
"""
LEGEND = """\
sent      by the rank that wrote the file, 10^3 bytes; of them values, indices, dense (sent whole) and headers
x fewer   dense float32 bytes over those sent, since the optimizer was built; steady: after warm-up
stages    milliseconds of a step that the exchange took of the processor or waited, the three largest"""


def _number(value: float | None, digits: int = 2, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:,.{digits}f}"


def _noted(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _stages(row: Row) -> str:
    stages = row["stage_seconds_per_step"]
    largest = sorted((name for name in stages if stages[name]), key=lambda name: -stages[name])[:3]
    return ", ".join(f"{name} {1e3 * stages[name]:.2f}" for name in largest) or "-"


def _part(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row["parts_per_step"][name], 2, 1e-3)


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("run", lambda row: str(row["run"])),
    ("steps", lambda row: f"{row['steps']:,}"),
    ("skipped", lambda row: f"{row['skipped_steps']:,.0f}"),
    ("ms/step", lambda row: _number(row["seconds_per_step"], 1, 1e3)),
    ("kB/step", lambda row: _number(row["bytes_per_step"], 2, 1e-3)),
    ("values", _part("values")),
    ("indices", _part("indices")),
    ("dense", _part("dense")),
    ("headers", _part("headers")),
    ("x fewer", lambda row: _number(row["wire_ratio"], 1)),
    ("steady", lambda row: _number(row["steady_wire_ratio"], 1)),
    ("stages", _stages),
    ("at the end", lambda row: ", ".join(f"{name} {_noted(value)}" for name, value in row["values"].items()) or "-"),
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``report`` to the command line."""
    parser = commands.add_parser(
        "report",
        help="what training runs have sent, from the files that they wrote",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by ringprune.StatsLog")
    parser.add_argument(
        "--plot", type=picture, metavar="FILE", help="draw bytes over steps, and what was noted over bytes"
    )
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write the rows to FILE for programs; - is standard output"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        runs = {path: read(path) for path in dict.fromkeys(options.files)}
        rows = [row_of(path, lines) for path, lines in runs.items()]
        if options.plot:
            draw({str(path): lines for path, lines in runs.items()}, options.plot)
    except RingPruneError as error:
        print(f"ringprune report: {error}", file=sys.stderr)
        return 2
    if options.json != "-":
        print_table(COLUMNS, rows)
        print(f"\n{LEGEND}")
    write_rows(rows, options.json)
    return 0
