"""Replays one method inside a job: iterations of waits and real communication, timed from barrier to barrier."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exchanges import interfaces, processors
from exchanges.job import Job
from exchanges.processors import Busy

from replays.methods import Method
from replays.model import Event, Waiting
from ringprune.profiles.format import Profile

__all__ = ["Seen", "Sizes", "replay"]


@dataclass(frozen=True)
class Sizes:
    """How much is replayed.

    Attributes:
        warmup: iterations that are not timed; the first teaches the gates of a schedule, in some thresholds settle.
        iterations: those that are.
    """

    warmup: int
    iterations: int


@dataclass(frozen=True)
class Seen:
    """What one rank saw.

    Attributes:
        seconds: per iteration, from the beginning of one to that of the next.
        transmitted: bytes this host sent per iteration, by interface.
        busy: how busy this process and its machine were.
        host: where, by its name on the network.
        machine: where, by what ranks of several emulated hosts have in common.
        events: what was done in the last iterations; times are since they began.
        auto: what a policy that chooses by itself has measured, predicted and chosen.
    """

    seconds: float
    transmitted: dict[str, float]
    busy: Busy
    host: str
    machine: str
    events: list[Event]
    auto: dict[str, Any]


def replay(
    job: Job, method: Method, profile: Profile, communicator: str, scale: float, sizes: Sizes, traced: bool
) -> list[Seen]:
    """Replay ``method`` on all ranks together.

    Args:
        job: the ranks.
        method: what is replayed.
        profile: the model's timeline.
        communicator: what carries RingPrune's messages.
        scale: what the profile's times are multiplied by; 0 leaves the communication alone.
        sizes: how much.
        traced: keep the events of rank 0.

    Returns:
        What each rank saw, in rank order, on every rank.
    """
    model = Waiting(profile, scale, job.rank)
    replayed = method.build(job, model, communicator)
    try:
        _iterate(model, replayed.step, sizes.warmup)
        while replayed.auto().get("deciding"):
            _iterate(model, replayed.step, 1)
        if replayed.auto():
            _iterate(model, replayed.step, sizes.warmup)  # what it has settled on begins anew, as the others did
        # Nothing is finished here: what the first of these iterations finds under way, the last one leaves so.
        before, busy = interfaces.sent(), processors.now()
        job.barrier()
        model.events.clear()
        start = time.perf_counter()
        _iterate(model, replayed.step, sizes.iterations)
        seconds = (time.perf_counter() - start) / sizes.iterations
        after, busy = interfaces.sent(), processors.now().since(busy)
        sent = {name: (count - before.get(name, 0)) / sizes.iterations for name, count in after.items()}
        replayed.finish()
        job.barrier()
        kept = traced and job.rank == 0
        events = [(what, name, a - start, b - start) for what, name, a, b in model.events] if kept else []
        return job.gather(Seen(seconds, sent, busy, interfaces.host(), processors.machine(), events, replayed.auto()))
    finally:
        replayed.close()
        del replayed, model
        gc.collect()  # wrapper and model hold each other; the next needs the memory


def _iterate(model: Waiting, step: Callable[[], None], iterations: int) -> None:
    for _ in range(iterations):
        model().backward()
        step()
