"""Bytes against the number of ranks: RingPrune's counters on simulated ranks, arithmetic for dense allreduces."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

import ringprune as rp
from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.exchange import Account, allreduce_bytes
from exchanges.gradients import Gradients
from exchanges.measure import Seen, Step
from exchanges.methods import Method
from exchanges.ours import RingPrune, made
from exchanges.processors import Busy
from exchanges.rows import Row, row_of
from ringprune.comm import Communicator

__all__ = ["RATE", "simulated_row", "sliced"]

RATE = "simulated"
NOBODY = Busy(1.0, 0.0, None)
SMALLEST_MATRIX = 2048
"""Tensors below it travel dense: a slice keeps a tensor on its side of it."""


def sliced(shapes: Mapping[str, tuple[int, ...]], entries: int) -> dict[str, tuple[int, ...]]:
    """The first rows of every tensor, so many that there are about ``entries`` in all; everything where it fits."""
    total = sum(map(math.prod, shapes.values()))
    if total <= entries:
        return dict(shapes)
    return {name: _rows_of(shape, entries / total) for name, shape in shapes.items()}


def _rows_of(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    row = math.prod(shape[1:])
    least = math.ceil(min(math.prod(shape), SMALLEST_MATRIX) / row) if len(shape) > 1 else 1
    return (min(shape[0], max(least, round(shape[0] * share))), *shape[1:])


def simulated_row(method: Method, choice: Choice, ranks: int, shapes: Mapping[str, tuple[int, ...]]) -> Row:
    """The row of one method on ``ranks`` simulated ranks: bytes and ratios, no seconds.

    Raises:
        CannotRun: the method is neither RingPrune's nor a dense allreduce.
    """
    numels = [math.prod(shape) for shape in shapes.values()]
    if method.policy:
        method.check(replace(choice, communicator="mpi"))
        seen = _simulate(method, choice, ranks, shapes)
    elif method.name.startswith(("horovod", "gloo")):
        sent = allreduce_bytes(sum(numels), 2 if "fp16" in method.name else 4, ranks)
        seen = [Seen(RATE, RATE, [Step(math.nan, {}, sent, sent, None, NOBODY)], Account(sent, sent))] * ranks
    else:
        raise CannotRun(f"{method.name}: cannot be simulated")
    row = row_of(replace(choice, rate="unlimited"), RATE, numels, seen)
    return row | {
        "rate": RATE,
        "seconds": None,
        "seconds_each": [],
        "spread": None,
        "compute_seconds": None,
        "communication_seconds": None,
        "foreign_cores": None,
    }


def _simulate(method: Method, choice: Choice, ranks: int, shapes: Mapping[str, tuple[int, ...]]) -> list[Seen]:
    torch.set_num_threads(1)  # the ranks are threads themselves

    def rank(comm: Communicator) -> Seen:
        module = Gradients(shapes, choice.seed, comm.rank)
        exchange = RingPrune(
            module, made(method.policy, choice, method.settings), comm, choice.seed, choice.bucket_bytes
        )
        accounts = [exchange.account()]
        for _ in range(choice.warmup + choice.steps):
            module.draw()
            exchange.run(exchange.prepare())
            accounts.append(exchange.account())
        exchange.close()
        steps = [_step(*pair) for pair in zip(accounts[choice.warmup :], accounts[choice.warmup + 1 :], strict=False)]
        return Seen(RATE, RATE, steps, accounts[-1])

    return rp.simulate(ranks, rank, timeout=600)


def _step(before: Account, after: Account) -> Step:
    assert None not in (before.sent, before.values, after.sent, after.values)
    return Step(math.nan, {}, after.sent - before.sent, after.values - before.values, None, NOBODY)
