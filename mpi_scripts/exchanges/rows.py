"""Rows for programs: medians over steps, ratios, and the time that the links need for the bytes alone."""

import datetime
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from statistics import fmean, median
from typing import Any

import emulated_cluster
import torch

from exchanges.choice import Choice
from exchanges.exchange import allreduce_bytes
from exchanges.interfaces import LOOPBACK
from exchanges.measure import Seen, Step
from exchanges.processors import Busy
from ringprune.bench import machine

__all__ = [
    "AS_IT_IS",
    "KEYS",
    "Row",
    "bits_per_second",
    "facts",
    "floor_seconds",
    "foreign_cores",
    "row_of",
    "sent_per_rank",
]

Row = dict[str, Any]

AS_IT_IS = "as it is"

SEGMENT = 1514 / 1448
"""Bytes of an Ethernet frame per byte of payload in it, at an MTU of 1500."""

KEYS = (
    "model",
    "method",
    "communicator",
    "ranks",
    "rate",
    "seconds",
    "seconds_floor",
    "nic_bytes_per_rank",
    "counted_bytes_per_rank",
    "wire_ratio",
    "value_ratio",
    "density",
    "compute_seconds",
)
"""What every row begins with."""


def bits_per_second(rate: str) -> float | None:
    """A rate such as ``"100mbit"`` in bit/s; None for ``"unlimited"`` and for what was not told.

    Raises:
        ValueError: it is no rate.
    """
    return None if rate == AS_IT_IS else emulated_cluster.bits_per_second(rate)


def floor_seconds(bytes_per_rank: float | None, rate: str) -> float | None:
    """Seconds that a link of ``rate`` needs for the bytes and their packets' headers, and for nothing else."""
    bits = bits_per_second(rate)
    return None if bits is None or bytes_per_rank is None else bytes_per_rank * 8 * SEGMENT / bits


def row_of(choice: Choice, communicator: str, numels: Sequence[int], seen: Sequence[Seen]) -> Row:
    """The row of one exchange.

    Args:
        choice: what was measured.
        communicator: what carried it.
        numels: entries of each tensor.
        seen: what each rank saw.
    """
    times = [max(steps) for steps in _by_step(seen, lambda step: step.seconds)]
    sent, values = _mean(seen, lambda step: step.sent), _mean(seen, lambda step: step.values)
    transmitted, interfaces = _transmitted(seen)
    dense = allreduce_bytes(sum(numels), 4, len(seen))
    return {
        "model": choice.model,
        "method": choice.method,
        "communicator": communicator,
        "ranks": len(seen),
        "rate": choice.rate,
        "seconds": median(times),
        "seconds_floor": floor_seconds(sent, choice.rate),
        "nic_bytes_per_rank": transmitted,
        "counted_bytes_per_rank": sent,
        "wire_ratio": _ratio(dense, sent),
        "value_ratio": _ratio(dense, values),
        "density": fmean(one.account.density for one in seen),
        "compute_seconds": _mean(seen, lambda step: step.computing),
        "communication_seconds": _alone(seen),
        "realised_density": fmean(one.account.realised_density for one in seen),
        "nic_ratio": _ratio(dense, transmitted),
        "dense_bytes_per_rank": dense,
        "steps": len(times),
        "warmup": choice.warmup,
        "seconds_each": times,
        "spread": (max(times) - min(times)) / median(times),
        "foreign_cores": _foreign(seen),
        "hosts": len({one.host for one in seen}),
        "interfaces": interfaces,
        "entries": sum(numels),
        "tensors": len(numels),
        "values": choice.values,
        "dense_values": choice.dense_values,
        "bucket_bytes": choice.bucket_bytes,
        "seed": choice.seed,
    }


def facts(library: str | None, load: float) -> Row:
    """What every row carries of the machine, the versions and the day.

    Args:
        library: what carried the job, with its version; None where nothing was sent.
        load: load average of the last minute before the job.
    """
    return {
        "load_before": load,
        "cores": os.cpu_count(),
        "library": library,
        "horovod": _version("horovod"),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **machine.facts(torch.device("cpu")),
    }


def _by_step(seen: Sequence[Seen], of: Callable[[Step], Any]) -> list[list[Any]]:
    """For each step what ``of`` gives on each rank."""
    return [[of(step) for step in ranks] for ranks in zip(*(one.steps for one in seen), strict=True)]


def _mean(seen: Sequence[Seen], of: Callable[[Step], float | None]) -> float | None:
    """Median over the steps of the mean over the ranks; None where a rank has none."""
    steps = _by_step(seen, of)
    return None if any(None in ranks for ranks in steps) else median(fmean(ranks) for ranks in steps)


def _alone(seen: Sequence[Seen]) -> float | None:
    """Median over the steps of the slowest rank's; None where nobody can tell."""
    times = [max(ranks) for ranks in zip(*(one.alone for one in seen), strict=True)]
    return median(times) if times else None


def _transmitted(seen: Sequence[Seen]) -> tuple[float | None, list[str]]:
    """Bytes per rank and step by the kernel's counters, and the interfaces they were read from.

    Ranks of one host read the same counters. Where all are on one host, what there is goes through ``lo``.
    """
    hosts = {one.host for one in seen}
    names = {name for one in seen for step in one.steps for name in step.transmitted}
    counted = {name for name in names if (name == LOOPBACK) == (len(hosts) == 1)}
    if not counted:
        return None, []
    totals = []
    for number in range(len(seen[0].steps)):
        by_host: dict[str, int] = dict.fromkeys(hosts, 0)
        for one in seen:
            here = sum(one.steps[number].transmitted.get(name, 0) for name in counted)
            by_host[one.host] = max(by_host[one.host], here)
        totals.append(sum(by_host.values()) / len(seen))
    return median(totals), sorted(counted)


def _foreign(seen: Sequence[Seen]) -> float | None:
    """Cores that others kept busy meanwhile, on the machine where it was worst; median over the steps."""
    worst = []
    for steps in zip(*(one.steps for one in seen), strict=True):
        found = foreign_cores((one.machine, step.busy) for one, step in zip(seen, steps, strict=True))
        if found is None:
            return None
        worst.append(found)
    return median(worst)


def foreign_cores(ranks: Iterable[tuple[str, Busy]]) -> float | None:
    """Cores that others kept busy, on the machine where it was worst, from each rank's machine and how busy it was.

    None where a machine does not tell.
    """
    ours: dict[str, list[Busy]] = {}
    for name, busy in ranks:
        ours.setdefault(name, []).append(busy)
    if any(busy.machine is None for here in ours.values() for busy in here):
        return None
    return max(map(_others, ours.values()))


def sent_per_rank(ranks: Sequence[tuple[str, dict[str, float]]]) -> float:
    """Bytes that hosts have sent, per rank, from each rank's host and what it read of its interfaces.

    Ranks of one host read the same counters. Where there are several hosts what stays inside one does not count.
    """
    hosts: dict[str, float] = {}
    several = len({host for host, _ in ranks}) > 1
    for host, transmitted in ranks:
        sent = sum(n for name, n in transmitted.items() if (name == LOOPBACK) != several)
        hosts[host] = max(hosts.get(host, 0.0), sent)
    return sum(hosts.values()) / len(ranks)


def _others(ranks: Sequence[Busy]) -> float:
    """Cores of a machine that were busy with something else than these ranks."""
    machine = fmean(busy.machine or 0.0 for busy in ranks)
    return max(0.0, machine - sum(busy.own for busy in ranks)) / fmean(busy.wall for busy in ranks)


def _ratio(dense: float, used: float | None) -> float | None:
    """How many times less than dense float32; None where nothing was sent, or nobody counted."""
    return dense / used if used else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
