"""What a cell's budget decides: the density, or the number of local steps, from probes and from whole runs."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from ringprune.errors import RingPruneError
from ringprune.simulation.budget import (
    EXACTLY,
    LOWEST,
    ROUGHLY,
    Forecast,
    Probe,
    Trial,
    density_of,
    exchanges_of,
    next_spec,
    solve,
    steps_apart,
    with_local_steps,
)
from ringprune.simulation.cell import Cell, Record, Runs
from ringprune.simulation.spec import Spec
from ringprune.simulation.store import Key

__all__ = ["Asking", "Setting", "Unreachable"]

T = TypeVar("T")
Asking = Generator[Sequence[Key], list[Record], T]
"""Something that asks for runs on its way: it yields their keys, is sent their records, and returns a ``T``."""

FIRST_PROBE, PROBE = 8, 48  # exchanges
PROBED_SHARE = 1 / 16  # of a run's steps, at most, where exchanges lie apart
CONTENTS = (("dense", "headers"), ("values", "indices"))


class Unreachable(RingPruneError):
    """No setting sends little enough; the message says what takes the bytes."""


class Setting:
    """Chooses a cell's setting.

    A density is first solved for from two probes, short runs of real training. Where the index set is a union of
    proposals, bytes depend on how much these have in common, which changes in training: whole runs at the middle rate
    then correct the density, roughly for comparing rates, exactly for the best one.

    Args:
        cell: which.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def choose(self) -> Asking[Spec]:
        """The method with what its budget decides, as a start for all rates.

        Raises:
            Unreachable: it does not fit.
        """
        solved = self._cell.solved
        if solved == "density":
            return (yield from self._density())
        if solved == "local_steps":
            return (yield from self._local_steps())
        if self._cell.budget < 1:
            yield from self._check()
        return self._cell.spec

    def exact(self, tried: Sequence[Runs]) -> Asking[Spec]:
        """What to run next at the best rate, after what was tried there; the last of these again if that is right."""
        if self._cell.solved != "density":
            return tried[-1].spec
        trials = [Trial(density_of(runs.spec), runs.bytes_sent) for runs in tried]
        return next_spec(self._cell.spec, (yield from self._forecast()), trials, EXACTLY, self._cell.allowed)

    def _check(self) -> Asking[None]:
        """Whether a specification of which nothing is solved for fits."""
        cell = self._cell
        sends = (yield from self._exchange()) * exchanges_of(cell.spec, self._rates(cell.steps))
        if sends > cell.allowed:
            raise Unreachable(f"{cell.spec} sends {sends / cell.allowed:.2f} times the budget")

    def _exchange(self) -> Asking[float]:
        """Bytes of one exchange of local steps."""
        probe = self._cell.key(self._cell.spec.exchanging_every(1), self._cell.middle, 0, steps=2)
        (record,) = yield [probe]
        return float(record["bytes_sent"]) / 2

    def _local_steps(self) -> Asking[Spec]:
        cell, exchange = self._cell, (yield from self._exchange())
        spec = with_local_steps(cell.spec, self._rates(cell.steps), exchange, cell.allowed)
        if spec is None:
            raise Unreachable(f"a single exchange sends {exchange / cell.allowed:.2f} times the budget")
        return spec

    def _density(self) -> Asking[Spec]:
        cell, forecast = self._cell, (yield from self._forecast())
        spec = solve(cell.spec, forecast, cell.allowed)
        if spec is None:
            what = "tensors that travel dense and headers"
            what += ", warm-up" * cell.spec.warms_up + ", the final flush" * cell.spec.flush
            raise Unreachable(f"{what}: {forecast.total(cell.spec, LOWEST) / cell.allowed:.2f} times the budget")
        trials: list[Trial] = []
        while not trials or density_of(spec) != trials[-1].density:
            record = yield from self._first_whole(spec)
            if record["value"] is None or any(density_of(spec) == trial.density for trial in trials):
                break
            trials.append(Trial(density_of(spec), record["bytes_sent"]))
            spec = next_spec(cell.spec, forecast, trials, ROUGHLY, cell.allowed)
        return spec

    def _first_whole(self, spec: Spec) -> Asking[Record]:
        """The run at the middle rate, or at the next lower one that did not diverge."""
        cell = self._cell
        for rate in sorted((rate for rate in cell.rates if rate <= cell.middle), reverse=True):
            (record,) = yield [cell.key(spec, rate, 0)]
            if record["value"] is not None:
                break
        return record

    def _forecast(self) -> Asking[Forecast]:
        """From two probes: at a first guess, and at what follows from it."""
        cell, spec = self._cell, self._cell.spec.without("warmup")
        exchanges = exchanges_of(spec, self._rates(cell.steps))
        if not exchanges:
            raise Unreachable(f"no exchange in {cell.steps} steps")
        each = cell.allowed / exchanges
        guess = _rounded(each / cell.dense_exchange * 4 / 5.5)  # a value has 4 bytes, and its index about 1.5
        first = yield from self._probe(spec, guess, FIRST_PROBE)
        second = _rounded(guess * max(each - first.fixed, 0.01 * each) / first.varying)
        probes = (first, (yield from self._probe(spec, second, PROBE)))
        return Forecast(probes, exchanges, cell.dense_exchange, cell.spec.flush)

    def _probe(self, spec: Spec, density: float, exchanges: int) -> Asking[Probe]:
        """A few exchanges of real training; without warm-up and flush, which are added up afterwards."""
        cell, exact = self._cell, replace(spec.with_(density=density), flush=False)
        apart = steps_apart(exact)
        least = max(FIRST_PROBE, int(getattr(exact.policy(), "refresh", 1)))
        count = max(least, min(exchanges, int(PROBED_SHARE * cell.steps / apart)))
        count = min(count, cell.steps // apart)
        (record,) = yield [cell.key(exact, cell.middle, 0, steps=count * apart)]
        made = max(1, exchanges_of(exact, self._rates(count * apart)))
        fixed, varying = (sum(record["parts"][f"bytes_{name}"] for name in names) / made for names in CONTENTS)
        if not varying:
            diverged = record["value"] is None
            raise Unreachable(f"training diverged in a probe, at {density:.3g}" if diverged else "nothing is packed")
        return Probe(density, fixed, varying)

    def _rates(self, steps: int) -> list[float]:
        """Learning rates of a run of so many steps, as shares of the highest."""
        return [self._cell.task.rate(step, steps, 1.0) for step in range(steps)]


def _rounded(density: float) -> float:
    return float(f"{min(1.0, max(1e-6, density)):.3g}")
