#!/usr/bin/env python3
"""Measures training with a large embedding, of which a step touches little: ``bench_embedding.py --help``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "examples")]

from embeddings import table
from embeddings.measure import rows as measure
from embeddings.methods import DEFAULTS, METHODS, named
from embeddings.words import Size
from emulated_cluster import CannotHere, Cluster, ClusterError
from exchanges.again import rows_of_job
from exchanges.errors import CannotRun
from exchanges.job import in_job, started_by
from exchanges.words import link_rate, listed, slower
from rich.console import Console

from ringprune.bench.table import write_rows
from ringprune.readers import above_zero, at_least, target

NOTHING_MEASURED, INTERRUPTED = 3, 130  # exit status

DESCRIPTION = """\
Trains a word model with a large table, of which a step touches little, and compares what its exchange costs. Words are
drawn by Zipf's law. Table, optimizer and messages are real; the other layers are waits, and gradients of their size.

Started as it is, it makes an emulated cluster on this machine (Linux, root), one rank per host, and takes it down.
Started by mpirun it measures in the job that it is in; --rates then names the speed of the links, and limits nothing.
"""
EPILOG = """\
examples:
  bench_embedding.py --ranks 4,8 --rates 1gbit --json rows.json
  bench_embedding.py --rows 793471 --dim 512 --tokens 2560 --methods horovod sharded-fp16
  mpirun -np 16 --hostfile hosts python mpi_scripts/bench_embedding.py --rates 10gbit

Methods:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, show."""
    is_rank = started_by(os.environ) is not None
    options = _parsed(arguments, is_rank)
    rows: list[dict[str, Any]] = []
    status = 0
    try:
        if is_rank:
            with in_job() as job:
                rows = measure(options, _size(options), job)
            if job.rank:
                return 0
        else:
            status = 1 if _outside(options, rows) else 0
    except (CannotRun, ClusterError) as error:
        print(f"bench_embedding: {error}", file=sys.stderr)
        if not rows:
            return NOTHING_MEASURED
        status = 1
    except KeyboardInterrupt:
        print("bench_embedding: stopped; jobs that were done are shown and written", file=sys.stderr)
        status = INTERRUPTED
    if rows:
        table.show(rows, Console(stderr=options.json == "-"))
    write_rows(rows, options.json)
    return status


def _size(options: argparse.Namespace) -> Size:
    return Size(options.rows, options.dim, options.tokens, options.dense, options.exponent, options.compute_ms)


def _outside(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Add to ``rows``; how many jobs have failed."""
    failures = 0
    for ranks in options.ranks:
        with Cluster.temporary(ranks, "unlimited") as cluster:
            for rate in options.rates:
                print(f"{ranks} hosts at {rate}", file=sys.stderr, flush=True)
                try:
                    cluster.rate(slower(rate, options.time_scale))
                    rows += _job(cluster, ranks, rate, options)
                except CannotHere:
                    raise
                except ClusterError as error:
                    failures += 1
                    print(f"failed: {ranks} hosts at {rate}: {error}", file=sys.stderr)
    return failures


def _job(cluster: Cluster, ranks: int, rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one number of ranks at one rate."""
    words = ["--rates", rate, "--methods", *options.methods, "--communicator", options.communicator]
    for name in (*SIZES, "time_scale", "rounds", "steps", "warmup"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return rows_of_job(cluster, ranks, words, timeout=options.time_limit)


# -- the command line -------------------------------------------------------------------------------------------------

SIZES = ("rows", "dim", "tokens", "dense", "exponent", "compute_ms")


def _parsed(arguments: Sequence[str] | None, is_rank: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench_embedding.py",
        description=DESCRIPTION,
        epilog=EPILOG + "\n".join(f"  {method.name:<14} {method.about}" for method in METHODS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--rows", type=at_least(1), default=100_000, metavar="N", help="of the table; 100000")
    what.add_argument("--dim", type=at_least(1), default=512, metavar="N", help="entries of a row; 512")
    what.add_argument("--tokens", type=at_least(1), default=6000, metavar="N", help="per rank and step; 6000")
    what.add_argument("--dense", type=at_least(1), default=600_000, metavar="N", help="other entries; 600000")
    what.add_argument("--exponent", type=above_zero, default=1.0, metavar="S", help="of Zipf's law; 1")
    what.add_argument("--compute-ms", type=_not_negative, default=0.0, metavar="MS", help="of a step; 0")
    what.add_argument("--methods", nargs="+", default=list(DEFAULTS), metavar="M", help=" ".join(DEFAULTS))
    what.add_argument("--communicator", choices=("horovod", "mpi", "torch"), default="mpi", help="of ours; mpi")
    where = parser.add_argument_group("where (lists are separated by commas)")
    where.add_argument(
        "--rates", type=listed(link_rate), default=["1gbit"], metavar="R,..", help="such as 4gbit, unlimited; 1gbit"
    )
    where.add_argument(
        "--ranks",
        type=listed(at_least(2, such_as="; one alone sends nothing")),
        default=[4],
        metavar="P,..",
        help="one per emulated host; 4",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--time-scale", type=above_zero, default=1.0, metavar="S", help="stretch waits and links; 1")
    how.add_argument("--rounds", type=at_least(1), default=3, metavar="N", help="each trains with every method; 3")
    how.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="steps that are timed in each; 5")
    how.add_argument("--warmup", type=at_least(1), default=2, metavar="N", help="steps before them; 2")
    how.add_argument("--time-limit", type=above_zero, default=900.0, metavar="S", help="seconds for each job; 900")
    how.add_argument("--json", type=target, metavar="FILE", help="write the rows for programs; - is standard output")
    options = parser.parse_args(arguments)
    try:
        named(options.methods)
    except ValueError as error:
        parser.error(f"--methods: {error}")
    if is_rank and len(options.rates) > 1:
        parser.error("in a job that is there the links have one rate")
    return options


def _not_negative(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else above_zero(text)


if __name__ == "__main__":
    sys.exit(main())
