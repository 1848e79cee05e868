"""``ringprune bench select``: what finding the most important entries costs, case by case."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ringprune import importance
from ringprune.bench import resnet50
from ringprune.bench.baselines import Memory, SampledThreshold, TorchTopk, exact_positions
from ringprune.bench.bucket import WARMUP, Bucket, Case
from ringprune.bench.local_step import local_step
from ringprune.bench.stopwatch import LEAST, Call, Times, stopwatch

__all__ = ["BYTES", "COLD_DENSITY", "DENSITIES", "SIZES", "Budget", "Row", "cases", "measure"]

Row = dict[str, Any]

SIZES = (100_000, 1_000_000, 10_000_000, 25_000_000)
DENSITIES = (0.001, 0.01, 0.05)
COLD_DENSITY = 0.01

BYTES = 24
"""Per entry, what a step moves at least: gradient, weight, residual and velocity read, the last two written."""

CHECKS = 3
"""Repetitions in which the positions are compared with those of ``torch.topk``."""

TRIES = 4
"""Where the time decides: how often a call is tried in a repetition until it is not disturbed."""

OURS = ("pass1", "fused", "full")
"""Calls whose ratios are close to one, and need times that count."""

READING = ("rms", "memory")
"""Calls that leave the bucket's state alone."""

REPLAYS = 100
"""Of a CUDA graph."""

STEPS = 12
"""Steps of the wrapper that are timed where the time decides on the repetitions."""


@dataclass(frozen=True)
class Budget:
    """How long one case is measured.

    Attributes:
        repetitions: exactly this many; None goes by the time.
        seconds: of repetitions, warm-up not counted; within ``least`` and ``most`` repetitions.
        patience: how many times the seconds may pass on a busy machine, until enough times count.
        slow: share of the time after which a call pauses that has been timed ``stopwatch.LEAST`` times.
        memory: entries of the arrays by which the memory is timed.
    """

    repetitions: int | None = None
    seconds: float = 6.0
    patience: float = 3.0
    least: int = 5
    most: int = 100
    slow: float = 0.35
    memory: int = 25_000_000

    def goes_on(self, done: int, spent: float, kept: int) -> bool:
        """Whether there is another repetition after ``done`` of them in ``spent`` seconds.

        ``kept`` of the times count of that call of ours of which the fewest do.
        """
        if self.repetitions is not None:
            return done < self.repetitions
        if done < self.least or (spent < self.seconds and done < self.most):
            return True
        return kept < self.least and spent < self.patience * self.seconds

    def is_due(self, times: Times, spent: float) -> bool:
        """Whether a call is timed in this repetition, or has had its share."""
        return self.repetitions is not None or times.of < LEAST or times.spent <= self.slow * spent


def cases(names: Sequence[str], sizes: Sequence[int], densities: Sequence[float]) -> Iterator[Case]:
    """The cases of these names."""
    if "flat" in names:
        yield from (Case("flat", ((size,),), density) for size in sizes for density in densities)
    if "cold" in names:
        yield from (Case("cold", ((size,),), COLD_DENSITY) for size in sizes)
    if "resnet50" in names:
        yield from (Case("resnet50", resnet50.SHAPES, density) for density in densities)


def measure(case: Case, device: torch.device, budget: Budget, seed: int, tick: Callable[[float], None]) -> Row:
    """Measure one case.

    Args:
        case: what.
        device: where.
        budget: how long.
        seed: of weights, gradients and the order of the calls.
        tick: told the share that is done, now and then.

    Returns:
        The figures of the row.
    """
    bucket = Bucket(case, device, seed)
    for _ in range(WARMUP):
        bucket.draw()
        bucket.step()
    bucket.hints.tally.zero_()
    memory = Memory(budget.memory, device)
    calls: dict[str, Call] = {
        "pass1": bucket.pass1,
        "fused": bucket.fused,
        "beside": bucket.beside,
        "full": bucket.full,
        "rms": bucket.rms,
        "torch_topk": TorchTopk(bucket),
        "dgc_sampling": SampledThreshold(bucket),
        "memory": memory,
    }
    times, exact = _repeat(bucket, calls, budget, seed, tick)
    row = _row(case, times, memory.bytes / times["memory"].seconds, exact)
    tally = bucket.hints.counts()
    row["read_again"] = sum(tally[why] for why in ("cold", "missed", "overflowed")) / max(tally["tensors"], 1)
    if device.type == "cuda":
        row["fraction_of_copy_bandwidth"] = 1 / row["ratio_to_triad"]
        row["graph_us"] = _graph_us(bucket)
    if case.name == "resnet50":
        del bucket, calls, memory
        row |= local_step(case, device, budget.repetitions or STEPS, seed)
    return row


def _repeat(
    bucket: Bucket, calls: dict[str, Call], budget: Budget, seed: int, tick: Callable[[float], None]
) -> tuple[dict[str, Times], bool]:
    """Time all calls on the state of one step, in an order drawn anew, make the step, and again."""
    clock, random = stopwatch(bucket.device, busy=True), Random(seed)
    times = {name: Times() for name in calls}
    bucket.draw()
    for call in calls.values():  # once untimed: first touches of memory are no part of a step
        bucket.restore()
        call()
    exact, done, start = True, 0, time.perf_counter()
    while budget.goes_on(done, spent := time.perf_counter() - start, min(times[name].kept for name in OURS)):
        tick(done / budget.repetitions if budget.repetitions else max(spent / budget.seconds, done / budget.most))
        bucket.draw()
        due = [name for name in calls if budget.is_due(times[name], spent)]
        random.shuffle(due)
        for name in due:
            for _ in range(1 if budget.repetitions else TRIES):
                if name not in READING:
                    bucket.restore()
                sample, result = clock.time(calls[name])
                times[name].samples.append(sample)
                if sample.is_calm or not budget.is_due(times[name], time.perf_counter() - start):
                    break
            if name == "fused" and done < CHECKS:
                exact = exact and torch.equal(result, exact_positions(bucket))
        bucket.step()
        done += 1
    return times, exact


def _row(case: Case, times: dict[str, Times], memory: float, exact: bool) -> Row:
    """The figures of a case; ``memory`` in bytes per second."""
    refresh = times["rms"].seconds / importance.RMS_REFRESH
    fused, full = times["fused"].seconds + refresh, times["full"].seconds + refresh
    bandwidth = BYTES * case.numel / fused
    return {
        "ns_per_element": fused / case.numel * 1e9,
        "gb_per_s": bandwidth / 1e9,
        "ratio_to_pass1": fused / times["pass1"].seconds,
        "ratio_to_triad": memory / bandwidth,
        "speedup_vs_torch_topk": times["torch_topk"].seconds / full,
        "speedup_vs_dgc_sampling": times["dgc_sampling"].seconds / fused,
        "exact": exact,
        "fused_ms": fused * 1e3,
        "full_step_ms": full * 1e3,
        "pass1_ms": times["pass1"].seconds * 1e3,
        "triad_gb_per_s": memory / 1e9,
        "kept": times["fused"].kept,
        "of": times["fused"].of,
        "disturbed": any(timed.disturbed for timed in times.values()),
        "timings": {
            name: {"ms": timed.seconds * 1e3, "kept": timed.kept, "of": timed.of} for name, timed in times.items()
        },
    }


def _graph_us(bucket: Bucket) -> float | None:
    """Microseconds of the fused step replayed from a CUDA graph; None where it cannot be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    bucket.restore()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(side):
            bucket.fused()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            bucket.fused()
    except RuntimeError as error:
        print(f"ringprune bench select: the step cannot be captured in a CUDA graph: {error}", file=sys.stderr)
        return None
    clock = stopwatch(bucket.device, busy=True)
    samples = []
    for _ in range(REPLAYS):
        bucket.draw()  # each replay makes the next step from the same state, with hints that fit it
        bucket.restore()
        samples.append(clock.time(graph.replay)[0])
    return Times(samples).seconds * 1e6
