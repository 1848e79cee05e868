"""Trains with every method in turn inside a job, round by round, and makes the rows of what was seen."""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median, stdev
from typing import Any

from exchanges import interfaces, processors
from exchanges.job import Job
from exchanges.processors import Busy
from exchanges.rows import facts, foreign_cores, sent_per_rank

from embeddings.methods import HOROVOD, Method, named
from embeddings.words import Size, batches

__all__ = ["rows"]

INDEX, ENTRY = 8, 4  # bytes: Horovod sends torch's own int64 indices and float32 rows


@dataclass(frozen=True)
class _Seen:
    """What one rank saw of one method in one round, per step."""

    seconds: float
    transmitted: dict[str, float]
    counted: float | None
    unique: float
    busy: Busy
    host: str
    machine: str


def rows(options: argparse.Namespace, size: Size, job: Job) -> list[dict[str, Any]]:
    """Measure all methods; all ranks together."""
    methods, load = named(options.methods), os.getloadavg()[0]
    seen: dict[str, list[list[_Seen]]] = {method.name: [] for method in methods}
    for number in range(options.rounds):
        for method in methods:
            if job.rank == 0:
                print(f"round {number + 1} of {options.rounds}: {method.name}", file=sys.stderr, flush=True)
            seen[method.name].append(_train(job, method, size, options, seed=number))
    theirs = [_slowest(these, options) for these in seen.get(HOROVOD, [])]
    extra = {"ranks": job.size, "rate": options.rates[0], "time_scale": options.time_scale}
    extra |= {"communicator": options.communicator, "rounds": options.rounds, "steps": options.steps}
    extra |= asdict(size) | facts(job.library, load)
    return [_row(name, rounds, theirs, options, size) | extra for name, rounds in seen.items()]


def _train(job: Job, method: Method, size: Size, options: argparse.Namespace, seed: int) -> list[_Seen]:
    trained = method.build(job, size, options.time_scale, options.communicator)
    try:
        words = batches(size, job.rank, seed)
        for _ in range(options.warmup):
            trained.step(next(words))
        given = [next(words) for _ in range(options.steps)]
        before, busy, counted = interfaces.sent(), processors.now(), trained.counted()
        job.barrier()
        start = time.perf_counter()
        for batch in given:
            trained.step(batch)
        seconds = (time.perf_counter() - start) / options.steps
        job.barrier()
        after, busy, ours = interfaces.sent(), processors.now().since(busy), trained.counted()
        sent = {name: (count - before.get(name, 0)) / options.steps for name, count in after.items()}
        used = None if ours is None or counted is None else (ours - counted) / options.steps
        unique = sum(len(batch.unique()) for batch in given) / options.steps
        return job.gather(_Seen(seconds, sent, used, unique, busy, interfaces.host(), processors.machine()))
    finally:
        trained.close()


def _slowest(seen: list[_Seen], options: argparse.Namespace) -> float:
    return max(one.seconds for one in seen) / float(options.time_scale)


def _row(
    name: str, rounds: list[list[_Seen]], theirs: list[float], options: argparse.Namespace, size: Size
) -> dict[str, Any]:
    ranks = len(rounds[0])
    each = [_slowest(seen, options) for seen in rounds]
    gains = [] if name == HOROVOD else [a / b for a, b in zip(theirs, each, strict=False)]
    unique = _mean([one.unique for seen in rounds for one in seen])
    counted = [one.counted for seen in rounds for one in seen]
    gathered = (ranks - 1) * size.tokens * (ENTRY * size.dim + INDEX)
    own = None if None in counted else _mean([n for n in counted if n is not None])
    nic = [sent_per_rank([(one.host, one.transmitted) for one in s]) for s in rounds]
    told = [foreign_cores((one.machine, one.busy) for one in s) for s in rounds]
    foreign = [cores for cores in told if cores is not None]
    return {
        "method": name,
        "seconds": median(each),
        "seconds_each": each,
        "words_per_second": ranks * size.tokens / median(each),
        "times_horovod": median(gains) if gains else None,
        "times_each": gains,
        "times_error": stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None,
        "unique_rows": unique,
        "touched": unique / size.rows,
        "tokens_per_row": size.tokens / unique,
        "table_bytes": own,
        "horovod_table_bytes": gathered,
        "table_ratio": gathered / own if own else None,
        "nic_bytes_per_rank": _mean(nic),
        "foreign_cores": median(foreign) if foreign else None,
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
