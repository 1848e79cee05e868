"""Ranks whose links and processors are made up, so that what is chosen is known beforehand."""

from collections.abc import Sequence
from typing import Any

import pytest

from ringprune.auto import pilot
from ringprune.prediction import CPU, MeasuredLink
from ringprune.prediction.link import Kind

KINDS: tuple[Kind, ...] = ("allreduce", "broadcast", "allgather", "alltoall", "ring")


def made_up_link(bytes_per_second: float, ranks: int) -> MeasuredLink:
    points = ((4.0, 1e-4), (4.0 + bytes_per_second, 1.0001))
    return MeasuredLink(dict.fromkeys(KINDS, points), ranks)


def quick(patch: pytest.MonkeyPatch, bytes_per_second: float = 1e6) -> None:
    """No rank is measured, few steps are timed, and all is done again soon."""
    patch.setattr(pilot, "measured_link", lambda comm, kinds, device, most: made_up_link(bytes_per_second, comm.size))
    patch.setattr(pilot, "measured", lambda *_, **__: CPU)
    patch.setattr(pilot, "TIMED", (1, 1, 0.0))
    patch.setattr(pilot, "HELD", (1, 1, 0.0))
    patch.setattr(pilot, "LEAST_INTERVAL", 3)
    # By its share of the time it would depend on how busy this machine is when measuring comes again.
    patch.setattr(pilot.Pilot, "_interval", property(lambda _: pilot.LEAST_INTERVAL))


def follow(patch: pytest.MonkeyPatch, choices: Sequence[int]) -> None:
    """In each round go through ``choices``, whatever was measured, and stay with the last; without any change nothing.

    One that was there before in the round ends it.
    """

    def choose(predicted: Any, compute: Any, ratios: Any, tried: Any, settled: int, **_: Any) -> int:
        return choices[min(len(tried), len(choices)) - 1] if choices else settled

    patch.setattr(pilot, "choose", choose)
