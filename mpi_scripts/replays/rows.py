"""What a replay comes to: iteration time, what of it is communication, how much of that is hidden, and the bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, stdev
from typing import Any

from ringprune.profiles.format import Profile

__all__ = ["Row", "Timing", "against_best", "error_of", "row_of"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one method, one entry per round, already divided by the time scale.

    Attributes:
        iterations: of an iteration.
        communication: of an exchange with nothing else to do; empty where that was left out.
        transmitted: bytes a host sent per iteration.
        foreign: cores that others kept busy; None where a machine does not tell.
        auto: what a policy that chooses by itself told; empty of others.
    """

    iterations: list[float]
    communication: list[float]
    transmitted: list[float]
    foreign: list[float | None]
    auto: list[dict[str, Any]] = field(default_factory=list)


def row_of(method: str, profile: Profile, timing: Timing, compute: float, reference: Sequence[float] | None) -> Row:
    """The row of one method.

    Args:
        method: its name.
        profile: what was replayed.
        timing: its seconds.
        compute: seconds of an iteration without any exchange, as measured.
        reference: plain Horovod's iterations, in the same rounds; None where it was not replayed.
    """
    seconds = median(timing.iterations)
    communication = median(timing.communication) if timing.communication else None
    bound = None if communication is None else max(compute, communication)
    known = [cores for cores in timing.foreign if cores is not None]
    gains = (
        []
        if reference is None
        else [theirs / ours - 1 for theirs, ours in zip(reference, timing.iterations, strict=True)]
    )
    return {
        "model": profile.model,
        "method": method,
        "seconds": seconds,
        "seconds_each": timing.iterations,
        "compute_seconds": compute,
        "communication_seconds": communication,
        "bound_seconds": bound,
        "over_bound": None if bound is None else seconds / bound - 1,
        "overlap": None if communication is None else _overlap(compute, communication, seconds),
        "gain_over_horovod": median(gains) if gains else None,
        "gain_each": gains,
        "gain_error": error_of(gains),
        "auto": timing.auto,
        "best": None,
        "over_best": None,
        "over_best_each": [],
        "over_best_error": None,
        "nic_bytes_per_rank": median(timing.transmitted),
        "foreign_cores": median(known) if len(known) == len(timing.foreign) else None,
        "entries": profile.entries,
        "provenance": profile.provenance,
    }


def against_best(chosen: Row, fixed: Sequence[Row]) -> Row:
    """What a method that chooses by itself took over the fastest of those that do not, round by round."""
    best = min(fixed, key=lambda row: float(row["seconds"]))
    each = [ours / theirs for ours, theirs in zip(chosen["seconds_each"], best["seconds_each"], strict=True)]
    return {
        "best": best["method"],
        "over_best": median(each) - 1,
        "over_best_each": [ratio - 1 for ratio in each],
        "over_best_error": error_of(each),
    }


def error_of(values: Sequence[float]) -> float | None:
    """The standard error of a mean; None of fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _overlap(compute: float, communication: float, seconds: float) -> float | None:
    """TicTac's overlap coefficient: 0 where one follows the other, 1 where the shorter is hidden by the longer."""
    shorter = min(compute, communication)
    return (compute + communication - seconds) / shorter if shorter > 0 else None
