"""Measures one exchange inside a job: barrier, step, barrier, step by step, and what every rank saw of it."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from exchanges import interfaces, processors
from exchanges.choice import Choice
from exchanges.exchange import Account, Exchange
from exchanges.gradients import Gradients
from exchanges.job import Job
from exchanges.methods import Method
from exchanges.processors import Busy

__all__ = ["Seen", "Step", "measure"]

REPEATED = 5
"""Steps whose messages are sent again: which ranks are roots differs between them."""

Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One timed step of one rank.

    Attributes:
        seconds: from the barrier to the end of the exchange on this rank.
        transmitted: bytes this host sent meanwhile, by interface, the barriers around included.
        sent: bytes sent by the method's own account; None where it keeps none.
        values: those of values.
        computing: seconds of it outside of communication; None where nobody can tell.
        busy: how busy this process and its machine were, from barrier to barrier.
    """

    seconds: float
    transmitted: Mapping[str, int]
    sent: float | None
    values: float | None
    computing: float | None
    busy: Busy


@dataclass(frozen=True)
class Seen:
    """What one rank saw.

    Attributes:
        host: its own.
        machine: the host's.
        steps: those that were timed.
        account: at the end.
        alone: seconds of sending the messages of a step again, with nothing in between, for some steps; empty where
            they are a library's own.
    """

    host: str
    machine: str
    steps: list[Step]
    account: Account
    alone: list[float] = field(default_factory=list)


def measure(job: Job, method: Method, choice: Choice, shapes: Mapping[str, tuple[int, ...]], tick: Tick) -> list[Seen]:
    """Measure ``method`` on gradients of these shapes; all ranks call it together.

    Args:
        job: the ranks.
        method: what is measured.
        choice: how.
        shapes: of the parameters, by name.
        tick: told which step of how many is done.

    Returns:
        What each rank saw, in rank order, on every rank.
    """
    module = Gradients(shapes, choice.seed, job.rank)
    exchange = method.build(job, module, choice)
    try:
        steps = []
        for number in range(choice.warmup + choice.steps):
            module.draw()
            loss = exchange.prepare()
            account, transmitted, busy = exchange.account(), interfaces.sent(), processors.now()
            job.barrier()  # behind the counters: no rank of this host has begun when they are read
            start = time.perf_counter()
            exchange.run(loss)
            seconds = time.perf_counter() - start
            job.barrier()
            if number >= choice.warmup:
                steps.append(_step(seconds, busy, transmitted, account, exchange.account()))
            tick(number + 1, choice.warmup + choice.steps)
        account = exchange.account()
        alone = _alone(job, module, exchange)
        return job.gather(Seen(interfaces.host(), processors.machine(), steps, account, alone))
    finally:
        exchange.close()
        del exchange, module
        gc.collect()  # wrapper and module hold each other; the next model needs the memory


def _alone(job: Job, module: Gradients, exchange: Exchange) -> list[float]:
    """Seconds of the messages of some more steps, sent again by themselves; none where a library has them."""
    seconds: list[float] = []
    while exchange.messages is not None and len(seconds) < REPEATED:
        module.draw()
        loss = exchange.prepare()
        exchange.messages.record()
        exchange.run(loss)
        job.barrier()
        start = time.perf_counter()
        exchange.messages.send_again()
        seconds.append(time.perf_counter() - start)
        job.barrier()
    return seconds


def _step(seconds: float, busy: Busy, transmitted: Mapping[str, int], before: Account, after: Account) -> Step:
    now = interfaces.sent()
    return Step(
        seconds,
        {name: now[name] - count for name, count in transmitted.items() if name in now},
        _difference(before.sent, after.sent),
        _difference(before.values, after.values),
        _difference(before.computing, after.computing),
        processors.now().since(busy),
    )


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
