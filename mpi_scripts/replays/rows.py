"""What a replay comes to: iteration time, what of it is communication, how much of that is hidden, and the bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from ringprune.profiles.format import Profile

__all__ = ["Row", "Timing", "row_of"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one method, one entry per round, already divided by the time scale.

    Attributes:
        iterations: of an iteration.
        communication: of an exchange with nothing else to do.
        transmitted: bytes a host sent per iteration.
        foreign: cores that others kept busy.
    """

    iterations: list[float]
    communication: list[float]
    transmitted: list[float]
    foreign: list[float]


def row_of(method: str, profile: Profile, timing: Timing, compute: float, reference: Sequence[float] | None) -> Row:
    """The row of one method.

    Args:
        method: its name.
        profile: what was replayed.
        timing: its seconds.
        compute: seconds of an iteration without any exchange, as measured.
        reference: plain Horovod's iterations, in the same rounds; None where it was not replayed.
    """
    seconds, communication = median(timing.iterations), median(timing.communication)
    bound = max(compute, communication)
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
        "over_bound": seconds / bound - 1,
        "overlap": _overlap(compute, communication, seconds),
        "gain_over_horovod": median(gains) if gains else None,
        "gain_each": gains,
        "gain_error": stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None,
        "nic_bytes_per_rank": median(timing.transmitted),
        "foreign_cores": median(timing.foreign),
        "entries": profile.entries,
        "provenance": profile.provenance,
    }


def _overlap(compute: float, communication: float, seconds: float) -> float | None:
    """TicTac's overlap coefficient: 0 where one follows the other, 1 where the shorter is hidden by the longer."""
    shorter = min(compute, communication)
    return (compute + communication - seconds) / shorter if shorter > 0 else None
