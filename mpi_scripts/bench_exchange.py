#!/usr/bin/env python3
"""Compares exchanges of gradients, in seconds and in bytes on the wire: ``bench_exchange.py --help``."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "examples")]

from emulated_cluster import CannotHere, ClusterError
from exchanges import inside, outside
from exchanges.errors import CannotRun
from exchanges.job import in_job, started_by
from exchanges.options import parsed
from exchanges.outside import NOTHING, NOTHING_MEASURED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ringprune.whole_file import write_json

INTERRUPTED = 130  # as shells say it

Row = dict[str, Any]


class Report:
    """What people are told meanwhile, on standard error: standard output may be a program's."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.failures = 0

    def say(self, line: str) -> None:
        """One line, such as why a method is left out."""
        self.failures += line.startswith("failed")
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, show; the exit status is that of the epilog of ``--help``."""
    job_kind = started_by(os.environ)
    options = parsed(arguments, inside=job_kind is not None)
    rows: list[Row] = []
    report = Report(Console(stderr=True))
    try:
        measured = _in_job(options, report) if job_kind else _outside(options, report)
        for row in measured:
            rows.append(row)
            _write(rows, options.json)
    except (CannotHere, CannotRun) as error:
        print(f"{'bench_exchange' if rows else NOTHING}: {error}", file=sys.stderr)
        _finish(rows, options)
        return NOTHING_MEASURED
    except ClusterError as error:
        report.say(f"failed: {error}")
    except KeyboardInterrupt:
        report.say("stopped: these are the rows that were done")
        _finish(rows, options)
        return INTERRUPTED
    _finish(rows, options)
    if not rows and not report.failures and job_kind is None:
        print(f"{NOTHING}: none of the methods can run here", file=sys.stderr)
        return NOTHING_MEASURED
    return 1 if report.failures else 0


def _outside(options: argparse.Namespace, report: Report) -> Iterator[Row]:
    with _bar(outside.total(options)) as move:
        yield from outside.rows(options, report.say, move)


def _in_job(options: argparse.Namespace, report: Report) -> Iterator[Row]:
    with in_job() as job:
        say = report.say if job.rank == 0 else lambda line: None
        rows = list(inside.rows(options, job, say))
    if job.rank == 0:
        yield from rows


def _finish(rows: list[Row], options: argparse.Namespace) -> None:
    """A figure and the table; standard output is a program's where it asked for the rows there."""
    if not rows:
        return
    from exchanges import table

    if options.json == "-":
        print(json.dumps(rows, indent=1))
    table.show(rows, Console(stderr=options.json == "-"))
    if options.plot:
        from exchanges.figure import draw

        draw(rows, options.plot)


def _write(rows: list[Row], to: str | None) -> None:
    """Rows for programs, those that are there so far: a job takes minutes, and the next one may fail."""
    if to != "-":
        write_json(rows, to)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line for each measurement as it begins."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        begun = 0

        def move(what: str) -> None:
            nonlocal begun
            progress.update(bar, description=what, completed=begun)
            begun += 1
            if not console.is_terminal:
                console.print(f"{begun}/{total}  {what}", markup=False, highlight=False, soft_wrap=True)

        yield move


if __name__ == "__main__":
    sys.exit(main())
