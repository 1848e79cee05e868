#!/usr/bin/env python3
"""Replays a model's timeline with real communication and waits in place of compute: ``replay.py --help``."""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent / "examples")]

from emulated_cluster import CannotHere, Cluster, ClusterError, bits_per_second, launch, mpirun  # noqa: E402
from exchanges.errors import CannotRun  # noqa: E402
from exchanges.job import current_job, started_by  # noqa: E402
from exchanges.methods import mca_flags  # noqa: E402
from replays import inside, table, timeline  # noqa: E402
from replays.methods import COMMUNICATORS, DEFAULTS, HOROVOD, named  # noqa: E402
from replays.profile import BadProfile, read  # noqa: E402
from rich.console import Console  # noqa: E402

PROFILES = HERE / "profiles"
NOTHING_MEASURED, INTERRUPTED = 3, 130  # exit status
TAIL = 12  # lines of a failed job that are shown

DESCRIPTION = """\
Shows what training would take on a cluster of GPUs, on a machine without any: each layer's forward and backward pass is
a wait as long as its profile says, gradients have the model's sizes, and everything between is real: autograd's hooks,
Horovod's or RingPrune's wrapper, and messages through links of the rate given. The wrapped optimizer does nothing.

Started as it is, it makes an emulated cluster on this machine (Linux, root), one rank per host, and takes it down.
Started by mpirun it replays in the job that it is in; --rates then names the speed of the links, and limits nothing.
"""
EPILOG = """\
examples:
  replay.py resnet50 --rates 4gbit --time-scale 10
  replay.py resnet50 vgg19 --rates 1gbit,10gbit --methods horovod p3 iwp:density=0.01@priority --json rows.json
  replay.py mine.json --time-scale 4 --trace mine.trace.json --plot mine.png

--time-scale S stretches waits and links together: waits take S times as long, links have 1/S of their rate, and times
are divided by S in the end. What this machine's processors need for moving bytes counts S times less then.

A profile is a JSON file: "model", "provenance", "unit": "ms", and "layers", each with "name", "parameters" (entries of
each tensor), "forward_ms" and "backward_ms", in the order of the forward pass.

Methods: horovod (hvd.DistributedOptimizer as it is), and RingPrune's policies with their arguments; @priority behind
one schedules what it sends (LayerPriority).

Exit status: 0; 1 a job failed; 2 wrong arguments; 3 nothing can be measured here.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, write, show."""
    in_job = started_by(os.environ) is not None
    options = _parsed(arguments, in_job)
    try:
        if in_job:
            return _in_job(options)
        rows, failures = _outside(options)
    except (CannotHere, CannotRun) as error:
        print(f"replay: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    except KeyboardInterrupt:
        return INTERRUPTED
    if rows:
        table.show(rows, Console(stderr=options.json == "-"))
    if options.json == "-":
        print(json.dumps(rows, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failures else 0


def _in_job(options: argparse.Namespace) -> int:
    job = current_job()
    try:
        rows, events = inside.rows(options, job)
    except CannotRun:
        raise
    except Exception:
        traceback.print_exc()
        job.abort()
    finally:
        job.close()
    if job.rank == 0:
        if options.json and options.json != "-":
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        else:
            table.show(rows, Console())
        if options.trace:
            timeline.write_trace(events, Path(options.trace))
        if options.plot:
            timeline.draw(
                events, f"{rows[0]['model']}, {rows[0]['ranks']} ranks, {rows[0]['rate']}", Path(options.plot)
            )
    return 0


def _outside(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    rows: list[dict[str, Any]] = []
    failures = 0
    with Cluster.temporary(options.ranks, "unlimited") as cluster:
        for path in options.profiles:
            for rate in options.rates:
                print(f"{path.stem} at {rate}, {options.ranks} hosts", file=sys.stderr, flush=True)
                cluster.rate(_scaled(rate, options.time_scale))
                try:
                    rows += _job(cluster, path, rate, options)
                except ClusterError as error:
                    failures += 1
                    print(f"failed: {path.stem} at {rate}: {error}", file=sys.stderr)
    return rows, failures


def _scaled(rate: str, scale: float) -> str:
    bits = bits_per_second(rate)
    return "unlimited" if bits is None else f"{bits / scale / 1e6:g}mbit"


def _job(cluster: Cluster, path: Path, rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one job, which is this program again, as ranks."""
    with tempfile.TemporaryDirectory(prefix="ringprune-replay-") as folder:
        written = Path(folder) / "rows.json"
        command = [sys.executable, sys.argv[0], str(path), "--rates", rate, "--json", str(written)]
        command += ["--methods", *options.methods, "--communicator", options.communicator]
        for name in ("time_scale", "rounds", "iterations", "warmup"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        for name in ("trace", "plot"):
            if chosen := getattr(options, name):
                command += [f"--{name}", str(Path(chosen).resolve())]
        if options.communicator == "torch" and HOROVOD not in options.methods:
            job = launch(cluster, options.ranks, command, timeout=options.time_limit, output="capture")
        else:
            flags = mca_flags(ring=True)
            job = mpirun(cluster, options.ranks, command, flags=flags, timeout=options.time_limit, output="capture")
        if job.returncode or not written.exists():
            lines = [line for line in job.output.splitlines() if line.strip()][-TAIL:]
            end = "".join(f"\n    {line}" for line in lines)
            raise ClusterError(f"its job ended with status {job.returncode} after {job.seconds:.0f} s{end}")
        found: list[dict[str, Any]] = json.loads(written.read_text())
    return found


# -- the command line -------------------------------------------------------------------------------------------------


def _parsed(arguments: Sequence[str] | None, in_job: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "replay.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.json")))
    add = parser.add_argument
    add("profiles", nargs="+", type=_profile, metavar="PROFILE", help=f"a file, or one of {known}")
    add("--methods", nargs="+", default=list(DEFAULTS), metavar="M", help=f"what is replayed; {' '.join(DEFAULTS)}")
    add("--rates", type=_rates, default=["1gbit"], metavar="R,..", help="of the links, such as 4gbit, unlimited; 1gbit")
    add("--ranks", type=_whole, default=4, metavar="N", help="hosts of the emulated cluster; 4")
    add("--time-scale", type=_positive, default=1.0, metavar="S", help="stretch waits and links by this; 1")
    add("--communicator", choices=COMMUNICATORS, default="horovod", help="of RingPrune's methods; horovod")
    add("--rounds", type=_whole, default=3, metavar="N", help="each replays all methods in turn; 3")
    add("--iterations", type=_whole, default=4, metavar="N", help="iterations that are timed in each; 4")
    add("--warmup", type=_whole, default=2, metavar="N", help="iterations before them; 2")
    add("--time-limit", type=_positive, default=900.0, metavar="S", help="seconds for each job; 900")
    add("--json", metavar="FILE", help="write the rows for programs; - is standard output")
    add("--trace", metavar="FILE", help="write what rank 0 did when, for chrome://tracing")
    add("--plot", metavar="FILE", help="draw it")
    options = parser.parse_args(arguments)
    try:
        named(options.methods)
        for path in options.profiles:
            read(path)
    except (BadProfile, ValueError) as error:
        parser.error(str(error))
    if options.ranks < 2:
        parser.error("--ranks: at least 2, one alone sends nothing")
    if in_job and len(options.profiles) * len(options.rates) > 1:
        parser.error("in a job that is there: one profile and one rate")
    return options


def _profile(text: str) -> Path:
    path = Path(text)
    return path if path.suffix == ".json" else PROFILES / f"{text}.json"


def _rates(text: str) -> list[str]:
    rates = [word.strip() for word in text.split(",")]
    for rate in rates:
        try:
            bits_per_second(rate)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return rates


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
