"""The comparison from outside: a cluster for each number of ranks, a job for each row, simulated ranks."""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from emulated_cluster import TIMED_OUT, Cluster, Job, launch, mpirun
from models import shapes

from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.methods import Method, mca_flags, named
from exchanges.options import RATES, choice_of
from exchanges.rows import Row, facts
from exchanges.simulated import simulated_row, sliced
from ringprune.errors import ConfigurationError

__all__ = ["NOTHING", "NOTHING_MEASURED", "Failed", "rows", "total"]

NOTHING = "bench_exchange: nothing measured"
NOTHING_MEASURED = 3  # exit status

TAIL = 12  # lines of a failed job that are shown

Say = Callable[[str], None]
Move = Callable[[str], None]


class Failed(Exception):
    """A job ended with an error; the message holds the end of what it wrote."""


def total(options: argparse.Namespace) -> int:
    """How many rows there can be."""
    rates = (len(options.rates or RATES) * len(options.ranks)) if options.jobs else 0
    return len(options.models) * len(options.methods) * (rates + len(options.simulate_ranks or ()))


def rows(options: argparse.Namespace, say: Say, move: Move) -> Iterator[Row]:
    """Measure everything that was asked for.

    Args:
        options: the command line.
        say: told one line for each method that cannot run, or failed.
        move: told what is measured next.

    Raises:
        emulated_cluster.CannotHere: this machine cannot hold a cluster.
    """
    yield from _simulated(options, say, move)
    end = time.monotonic() + options.within
    for ranks in options.ranks if options.jobs else ():
        if time.monotonic() > end:
            return
        with Cluster.temporary(ranks, "unlimited") as cluster:
            yield from _on(cluster, ranks, options, end, say, move)


def _on(cluster: Cluster, ranks: int, options: argparse.Namespace, end: float, say: Say, move: Move) -> Iterator[Row]:
    for rate in options.rates or RATES:
        cluster.rate(rate)
        for model in options.models:
            for method in named(options.methods):
                move(f"{model} {method.name}, {ranks} ranks, {rate}")
                choice = choice_of(options, model, method.name, rate)
                left = end - time.monotonic()
                if left <= 0:
                    say(f"skipped: this and the rest, the time of --within {options.within:g} is over")
                    return
                try:
                    method.check(choice)
                    limit = min(left, options.time_limit)
                    yield from _measured(cluster, ranks, method, choice, limit, last=limit < options.time_limit)
                except (CannotRun, Failed) as error:
                    say(f"{'failed' if isinstance(error, Failed) else 'skipped'}: {error}")


def _measured(
    cluster: Cluster, ranks: int, method: Method, choice: Choice, time_limit: float, *, last: bool
) -> list[Row]:
    """The row of one job, which is this program again, as ranks; ``last``: its limit is that of ``--within``."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ringprune-bench-") as folder:
        written = Path(folder) / "rows.json"
        command = [sys.executable, sys.argv[0], *_arguments(choice), "--json", str(written)]
        if method.launcher(choice.communicator) == "torch":
            job = launch(cluster, ranks, command, timeout=time_limit, output="capture")
        else:
            flags = mca_flags(method.ring)
            job = mpirun(cluster, ranks, command, flags=flags, timeout=time_limit, output="capture")
        if job.returncode == NOTHING_MEASURED and (why := re.search(rf"{NOTHING}: (.*)", job.output)):
            raise CannotRun(f"{method.name}: {why[1].strip()}")
        if job.returncode == TIMED_OUT and last:
            raise CannotRun(f"{method.name}: not done when the time of --within was over")
        if job.returncode or not written.exists():
            raise Failed(_failure(method, job))
        found: list[Row] = json.loads(written.read_text())
    return [row | {"load_before": load, "emulated": True} for row in found]


def _arguments(choice: Choice) -> list[str]:
    """The command line that measures just this."""
    given = {
        "--models": choice.model,
        "--methods": choice.method,
        "--rates": choice.rate,
        "--density": choice.density,
        "--communicator": choice.communicator,
        "--values": choice.values,
        "--dense-values": choice.dense_values,
        "--steps": choice.steps,
        "--warmup": choice.warmup,
        "--seed": choice.seed,
        "--bucket-bytes": choice.bucket_bytes,
        "--peer": choice.peer if choice.method == "peer" else None,
    }
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def _failure(method: Method, job: Job) -> str:
    lines = [line for line in job.output.splitlines() if line.strip()]
    end = "".join(f"\n    {line}" for line in lines[-TAIL:])
    return f"{method.name}: its job ended with status {job.returncode} after {job.seconds:.0f} s{end}"


def _simulated(options: argparse.Namespace, say: Say, move: Move) -> Iterator[Row]:
    for model in options.models if options.simulate_ranks else ():
        whole = shapes(model)
        part = sliced(whole, options.simulate_entries)
        for method in named(options.methods):
            for ranks in options.simulate_ranks:
                move(f"{model} {method.name}, {ranks} simulated ranks")
                choice = choice_of(options, model, method.name, "unlimited")
                load = os.getloadavg()[0]
                try:
                    row = simulated_row(method, choice, ranks, part)
                except (CannotRun, ConfigurationError) as error:
                    say(f"skipped: {error}")
                    break
                entries = sum(map(math.prod, whole.values())) if part != whole else None
                yield row | {"sliced_from": entries, "emulated": False} | facts(None, load)
