#!/usr/bin/env python3
"""Measures sums over the ranks, RingPrune's ring and those of the libraries: ``bench_allreduce.py --help``."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "examples")]

import torch
from emulated_cluster import CannotHere, Cluster, ClusterError
from exchanges import processors
from exchanges.again import rows_of_job
from exchanges.errors import CannotRun
from exchanges.exchange import allreduce_bytes
from exchanges.job import Job, in_job, started_by
from exchanges.rows import AS_IT_IS, Row, facts, floor_seconds, foreign_cores
from exchanges.table import print_rows
from exchanges.words import link_rate, listed
from rich.console import Console

import ringprune as rp
from ringprune.bench.table import write_rows
from ringprune.readers import above_zero, at_least, target
from ringprune.reduction.ring import RingReduction

NOTHING_MEASURED, INTERRUPTED = 3, 130  # exit status

DESCRIPTION = """\
Sums float32 values over the ranks, and compares how long that takes with what the links need for the bytes alone:

  ringprune       our ring over MPI's point-to-point calls
  open-mpi        the library's allreduce, by its own choice of algorithm
  open-mpi-ring   the same, told to use the ring
  gloo            torch.distributed's allreduce

Started as it is, it makes an emulated cluster on this machine (Linux, root), one rank per host, and takes it down.
Started by mpirun it measures in the job that it is in; --rate then names the speed of the links, and limits nothing.
"""
EPILOG = """\
examples:
  bench_allreduce.py --ranks 4 --rate 1gbit --megabytes 1,10,100 --json rows.json
  mpirun -np 16 --hostfile hosts python mpi_scripts/bench_allreduce.py --rate 10gbit
"""

COLUMNS = (
    ("method", "method", "", 1),
    ("MB", "megabytes", "g", 1),
    ("ranks", "ranks", "", 1),
    ("rate", "rate", "", 1),
    ("ms", "seconds", ",.1f", 1e3),
    ("best", "best_seconds", ",.1f", 1e3),
    ("floor", "seconds_floor", ",.1f", 1e3),
    ("of floor", "share_of_floor", ".1%", 1),
    ("foreign", "foreign_cores", ".1f", 1),
)
LEGEND = """\
ms         median over the runs, the slowest rank's; best: the shortest. All methods of a job take turns
floor      what a link of this rate needs for 2 (P-1)/P of the bytes with their packets' headers, and for nothing else
of floor   floor over ms: 100 % is a link that never waits
foreign    cores that other processes kept busy: above a few tenths believe no times"""

Sum = Callable[[torch.Tensor], object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, show."""
    is_rank = started_by(os.environ) is not None
    options = _parsed(arguments)
    options.rate = options.rate or (AS_IT_IS if is_rank else "1gbit")
    try:
        if is_rank:
            with in_job() as job:
                rows = list(_rows(options, job))
            if job.rank:
                return 0
        else:
            rows = _outside(options)
    except (CannotHere, CannotRun, ClusterError) as error:
        print(f"bench_allreduce: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    except KeyboardInterrupt:
        return INTERRUPTED
    console = Console(stderr=options.json == "-")
    print_rows(COLUMNS, rows, "sums over the ranks", console)
    console.print(LEGEND, markup=False, highlight=False, soft_wrap=True)
    write_rows(rows, options.json)
    return 0


def _outside(options: argparse.Namespace) -> list[Row]:
    """Two jobs: Open MPI chooses for itself in one, and is told to use the ring in the other."""
    sizes = ",".join(f"{size:g}" for size in options.megabytes)
    words = ["--rate", options.rate, "--megabytes", sizes, "--runs", str(options.runs), "--warmup", str(options.warmup)]
    rows: list[Row] = []
    with Cluster.temporary(options.ranks, options.rate) as cluster:
        for ring in (False, True):
            print(
                f"{options.ranks} hosts at {options.rate}, Open MPI's {'ring' if ring else 'own choice'}",
                file=sys.stderr,
            )
            rows += rows_of_job(cluster, options.ranks, words, timeout=options.time_limit, ring=ring)
    return rows


def _rows(options: argparse.Namespace, job: Job) -> list[Row]:
    """The rows of the job that this process is a rank of; all ranks together.

    Raises:
        CannotRun: one rank, or no MPI.
    """
    if job.size < 2:
        raise CannotRun("one rank alone sends nothing: mpirun -np 2 or more")
    if job.kind != "mpi":
        raise CannotRun("needs a job that mpirun has started")
    from mpi4py import MPI

    load = os.getloadavg()[0]
    comm = rp.connect("mpi")
    job.join_torch()
    sums: dict[str, Sum] = {
        "ringprune": lambda values: RingReduction(comm, values, None, name="sum").wait(),
        "open-mpi-ring" if job.ring else "open-mpi": lambda values: MPI.COMM_WORLD.Allreduce(
            MPI.IN_PLACE, values.numpy()
        ),
        "gloo": torch.distributed.all_reduce,
    }
    rows = []
    for megabytes in options.megabytes:
        values = torch.zeros(max(1, round(megabytes * 1e6 / 4)), dtype=torch.float32, device="cpu")
        sent = allreduce_bytes(values.numel(), 4, job.size)
        floor = floor_seconds(sent, options.rate)
        times, busy = _times(job, sums, values, options)
        for method, seconds in times.items():
            row = {
                "method": method,
                "megabytes": megabytes,
                "ranks": job.size,
                "rate": options.rate,
                "seconds": median(seconds),
                "best_seconds": min(seconds),
                "seconds_floor": floor,
                "share_of_floor": None if floor is None else floor / median(seconds),
                "seconds_each": seconds,
                "open_mpi_ring": job.ring,
                "foreign_cores": busy,
            }
            rows.append(row | facts(job.library, load))
    comm.close()
    return rows


def _times(
    job: Job, sums: dict[str, Sum], values: torch.Tensor, options: argparse.Namespace
) -> tuple[dict[str, list[float]], float | None]:
    """The slowest rank's seconds of each run, and the cores that others kept busy meanwhile."""
    own: dict[str, list[float]] = {method: [] for method in sums}
    before = processors.now()
    for _ in range(options.warmup + options.runs):
        for method, add in sums.items():
            job.barrier()
            start = time.perf_counter()
            add(values)
            own[method].append(time.perf_counter() - start)
    seen = job.gather((own, processors.machine(), processors.now().since(before)))
    slowest = {
        method: [max(run) for run in zip(*(ranks[method] for ranks, _, _ in seen), strict=True)] for method in sums
    }
    foreign = foreign_cores((machine, busy) for _, machine, busy in seen)
    return {method: seconds[options.warmup :] for method, seconds in slowest.items()}, foreign


# -- the command line -------------------------------------------------------------------------------------------------


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench_allreduce.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks", type=at_least(2), default=4, metavar="P", help="one per emulated host; 4, in a job all of it"
    )
    parser.add_argument(
        "--rate", type=link_rate, metavar="R", help="such as 10gbit, unlimited; 1gbit, in a job unknown"
    )
    parser.add_argument(
        "--megabytes", type=listed(above_zero), default=[100.0], metavar="M,..", help="that each rank adds; 100"
    )
    parser.add_argument("--runs", type=at_least(1), default=7, metavar="N", help="that are timed; 7")
    parser.add_argument("--warmup", type=at_least(0), default=1, metavar="N", help="before them; 1")
    parser.add_argument(
        "--time-limit", type=above_zero, default=600.0, metavar="S", help="seconds for each job made; 600"
    )
    parser.add_argument("--json", type=target, metavar="FILE", help="write the rows for programs; - is standard output")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
