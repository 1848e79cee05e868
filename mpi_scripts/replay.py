#!/usr/bin/env python3
"""Replays a model's timeline with real communication and waits in place of compute: ``replay.py --help``."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "examples")]

from emulated_cluster import CannotHere, Cluster, ClusterError
from exchanges.again import rows_of_job
from exchanges.errors import CannotRun
from exchanges.job import in_job, started_by
from exchanges.words import link_rate, listed, slower
from replays import inside, table, timeline
from replays.methods import COMMUNICATORS, DEFAULTS, HOROVOD, named
from rich.console import Console

from ringprune.bench.table import write_rows
from ringprune.profiles.format import BadProfile, read
from ringprune.readers import above_zero, at_least, file, picture, target
from ringprune.simulation.makers import POLICIES_HELP

PROFILES = HERE / "profiles"
KNOWN = sorted(path.stem for path in PROFILES.glob("*.json"))
NOTHING_MEASURED, INTERRUPTED = 3, 130  # exit status

DESCRIPTION = """\
Shows what training would take on a cluster of GPUs, on a machine without any: each layer's forward and backward pass is
a wait as long as its profile says, gradients have the model's sizes, and everything between is real: autograd's hooks,
Horovod's or RingPrune's wrapper, and messages through links of the rate given. The wrapped optimizer does nothing.

Started as it is, it makes an emulated cluster on this machine (Linux, root), one rank per host, and takes it down.
Started by mpirun it replays in the job that it is in; --rates then names the speed of the links, and limits nothing.
"""
EPILOG = f"""\
examples:
  replay.py resnet50 --rates 4gbit --time-scale 10
  replay.py resnet50 vgg19 --rates 1gbit,10gbit --methods horovod p3 iwp:density=0.01@priority --json rows.json
  ringprune profile train.py      records a profile of your own script: train.profile.json
  replay.py train.profile.json --time-scale 4 --trace mine.trace.json --plot mine.png

--time-scale S stretches waits and links together: waits take S times as long, links have 1/S of their rate, and times
are divided by S in the end. What this machine's processors need for moving bytes counts S times less then.

A profile is a JSON file: "model", "provenance", "unit": "ms", and "layers", each with "name", "parameters" (entries of
each tensor), "forward_ms" and "backward_ms", in the order of the forward pass.

Methods: horovod (hvd.DistributedOptimizer as it is), alone (no exchange at all), and policies; @priority behind one
schedules what it sends (LayerPriority). auto chooses from the policies given beside it, and is timed when it has.

{POLICIES_HELP}
Exit status: 0; 1 a job failed; 2 wrong arguments; 3 nothing can be measured here; 130
interrupted, with the rows of the jobs that were done.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, write, show."""
    is_rank = started_by(os.environ) is not None
    options = _parsed(arguments, is_rank)
    rows: list[dict[str, Any]] = []
    try:
        if is_rank:
            return _in_job(options)
        status = 1 if _outside(options, rows) else 0
    except (CannotRun, ClusterError) as error:
        print(f"replay: {error}", file=sys.stderr)
        if not rows:
            return NOTHING_MEASURED
        status = 1
    except KeyboardInterrupt:
        print("replay: stopped; jobs that were done are shown and written", file=sys.stderr)
        status = INTERRUPTED
    if rows:
        table.show(rows, Console(stderr=options.json == "-"))
    write_rows(rows, options.json)
    return status


def _in_job(options: argparse.Namespace) -> int:
    with in_job() as job:
        rows, events = inside.rows(options, job)
    if job.rank == 0:
        if options.json:
            write_rows(rows, options.json)
        else:
            table.show(rows, Console())
        if options.trace:
            timeline.write_trace(events, options.trace)
        if options.plot:
            timeline.draw(events, f"{rows[0]['model']}, {rows[0]['ranks']} ranks, {rows[0]['rate']}", options.plot)
    return 0


def _outside(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Add to ``rows``; how many jobs have failed."""
    failures = 0
    with Cluster.temporary(options.ranks, "unlimited") as cluster:
        for path in options.profiles:
            for rate in options.rates:
                print(f"{path.stem} at {rate}, {options.ranks} hosts", file=sys.stderr, flush=True)
                try:
                    cluster.rate(slower(rate, options.time_scale))
                    rows += _job(cluster, path, rate, options)
                except CannotHere:
                    raise
                except ClusterError as error:
                    failures += 1
                    print(f"failed: {path.stem} at {rate}: {error}", file=sys.stderr)
    return failures


def _job(cluster: Cluster, path: Path, rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one profile at one rate."""
    words = [str(path), "--rates", rate, "--methods", *options.methods, "--communicator", options.communicator]
    for name in ("time_scale", "rounds", "iterations", "warmup"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    for name in ("trace", "plot"):
        if chosen := getattr(options, name):
            words += [f"--{name}", str(Path(chosen).resolve())]
    words += ["--brief"] if options.brief else []
    torch = options.communicator == "torch" and HOROVOD not in options.methods
    return rows_of_job(cluster, options.ranks, words, timeout=options.time_limit, torch=torch)


# -- the command line -------------------------------------------------------------------------------------------------


def _parsed(arguments: Sequence[str] | None, is_rank: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "replay.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("profiles", nargs="+", type=_profile, metavar="PROFILE", help=f"a file, or one of {', '.join(KNOWN)}")
    add("--methods", nargs="+", default=list(DEFAULTS), metavar="M", help=f"what is replayed; {' '.join(DEFAULTS)}")
    add(
        "--rates",
        type=listed(link_rate),
        default=["1gbit"],
        metavar="R,..",
        help="of the links, such as 4gbit, unlimited; 1gbit",
    )
    add(
        "--ranks",
        type=at_least(2, such_as="; one alone sends nothing"),
        default=4,
        metavar="N",
        help="hosts of the emulated cluster; 4",
    )
    add("--time-scale", type=above_zero, default=1.0, metavar="S", help="stretch waits and links by this; 1")
    add("--communicator", choices=COMMUNICATORS, default="horovod", help="of RingPrune's methods; horovod")
    add(
        "--rounds",
        type=at_least(1),
        default=4,
        metavar="N",
        help="each replays all methods in turn, every other one from the last to the first; 4",
    )
    add("--iterations", type=at_least(1), default=4, metavar="N", help="iterations that are timed in each; 4")
    add("--warmup", type=at_least(1), default=5, metavar="N", help="iterations before them, until thresholds settle; 5")
    add("--brief", action="store_true", help="leave out exchanges with nothing else to do: network, bound, overlap")
    add("--time-limit", type=above_zero, default=900.0, metavar="S", help="seconds for each job; 900")
    add("--json", type=target, metavar="FILE", help="write the rows for programs; - is standard output")
    add("--trace", type=file, metavar="FILE", help="write what rank 0 did when, for chrome://tracing")
    add("--plot", type=picture, metavar="FILE", help="draw it; .png, .pdf or .svg")
    options = parser.parse_args(arguments)
    try:
        named(options.methods)
        for path in options.profiles:
            read(path)
    except (BadProfile, ValueError) as error:
        parser.error(str(error))
    if len(options.profiles) * len(options.rates) > 1:
        if is_rank:
            parser.error("in a job that is there: one profile and one rate")
        if options.trace or options.plot:
            parser.error("--trace and --plot are of one profile at one rate: of several the last would be left")
    return options


def _profile(text: str) -> Path:
    path = Path(text)
    if path.suffix == ".json":
        return path
    if text not in KNOWN:
        near = difflib.get_close_matches(text, KNOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(KNOWN)}, or a file that ends in .json{hint}")
    return PROFILES / f"{text}.json"


if __name__ == "__main__":
    sys.exit(main())
