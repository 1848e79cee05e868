"""A replay inside a job: all methods in turn, round by round, so that what varies with time varies for all of them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from exchanges.job import Job
from exchanges.rows import facts, foreign_cores, sent_per_rank

from replays.measure import Seen, Sizes, replay
from replays.methods import ALONE, AUTO, HOROVOD, Method, named
from replays.model import Event
from replays.rows import Timing, against_best, row_of
from ringprune.profiles.format import Profile, read

__all__ = ["add", "rows", "turns"]


def rows(options: argparse.Namespace, job: Job) -> tuple[list[dict[str, Any]], dict[str, list[Event]]]:
    """Replay one profile with every method; all ranks together.

    Returns:
        The rows, and of each method what rank 0 did in the last round.
    """
    profile, load = read(Path(options.profiles[0])), os.getloadavg()[0]
    methods = named(options.methods)
    timings = {method.name: Timing([], [], [], []) for method in methods}
    compute: list[float] = []
    events: dict[str, list[Event]] = {}
    for number in range(options.rounds):
        alone = _replay(job, named([ALONE])[0], profile, options, traced=False)
        compute.append(_slowest(alone) / options.time_scale)
        for method in turns(methods, number):
            _tell(job, f"{profile.model}, round {number + 1} of {options.rounds}: {method.name}")
            seen = _replay(job, method, profile, options, traced=number == options.rounds - 1)
            bare = [] if options.brief else _replay(job, method, profile, options, traced=False, silent=True)
            add(timings[method.name], seen, bare, options.time_scale)
            events[method.name] = seen[0].events
    reference = timings[HOROVOD].iterations if HOROVOD in timings else None
    whole = median(compute)
    extra = {"ranks": job.size, "rate": options.rates[0], "time_scale": options.time_scale}
    extra |= {"communicator": options.communicator, "rounds": options.rounds, "iterations": options.iterations}
    made = [
        row_of(name, profile, timing, whole, None if name == HOROVOD else reference) | extra | facts(job.library, load)
        for name, timing in timings.items()
    ]
    fixed = [row for row in made if row["method"] not in (AUTO, HOROVOD, ALONE)]
    made = [row | (against_best(row, fixed) if row["method"] == AUTO and fixed else {}) for row in made]
    return made, events


def turns(methods: Sequence[Method], number: int) -> Sequence[Method]:
    """Who is replayed after whom in round ``number``: to and fro, lest the same one always come last."""
    return methods if number % 2 == 0 else methods[::-1]


def _replay(
    job: Job, method: Method, profile: Profile, options: argparse.Namespace, *, traced: bool, silent: bool = False
) -> list[Seen]:
    sizes = Sizes(options.warmup, max(1, options.iterations // 2) if silent else options.iterations)
    scale = 0.0 if silent else options.time_scale
    return replay(job, method, profile, options.communicator, scale, sizes, traced)


def _slowest(seen: Sequence[Seen]) -> float:
    return max(one.seconds for one in seen)


def add(timing: Timing, seen: Sequence[Seen], bare: Sequence[Seen], scale: float) -> None:
    """Add what the ranks saw of one round: ``bare`` with nothing to wait for, empty where that was left out."""
    timing.iterations.append(_slowest(seen) / scale)
    timing.auto.extend([seen[0].auto] if seen[0].auto else [])
    if bare:
        timing.communication.append(_slowest(bare) / scale)
    timing.transmitted.append(sent_per_rank([(one.host, one.transmitted) for one in seen]))
    timing.foreign.append(foreign_cores((one.machine, one.busy) for one in seen))


def _tell(job: Job, what: str) -> None:
    if job.rank == 0:
        print(what, file=sys.stderr, flush=True)
