"""Chooses a density, or a number of local steps, so that a whole run sends what its budget allows."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ringprune.local_steps import Interval
from ringprune.routing import sent_whole
from ringprune.simulation.spec import Spec

__all__ = [
    "EXACTLY",
    "LOWEST",
    "ROUGHLY",
    "Forecast",
    "Probe",
    "Trial",
    "density_of",
    "exchanges_of",
    "next_spec",
    "solve",
    "steps_apart",
    "with_local_steps",
]

EXACTLY = (0.98, 1.0)
"""Shares of its budget that the best runs of a method have to lie between."""

ROUGHLY = (0.95, 1.04)
"""The same while learning rates are compared."""

AIM = 0.99
"""Share of the budget that is aimed at."""

TRIES = 5  # densities, until one is taken that is within budget but further below it

NARROW = 1.015  # two densities, one above the budget and one below, that leave no room for a third

LOWEST = 1e-7  # density


@dataclass(frozen=True)
class Probe:
    """What a few exchanges sent, in bytes per exchange and rank.

    Attributes:
        density: of the probe.
        fixed: what does not depend on the density: tensors that travel dense, headers.
        varying: indices and values.
    """

    density: float
    fixed: float
    varying: float


@dataclass(frozen=True)
class Forecast:
    """Bytes of a whole run as a function of the density.

    Attributes:
        probes: one or two; between and beyond them bytes are a power of the density.
        exchanges: of the run.
        dense: bytes of an exchange that sends everything dense.
        flushed: whether the run ends with one of these.
        factor: by how much more than the probes a run of full length sent at densities beside them.
    """

    probes: tuple[Probe, ...]
    exchanges: int
    dense: float
    flushed: bool
    factor: float = 1.0

    def parts(self, spec: Spec) -> tuple[float, float]:
        """Bytes of a run: those that are certain, and those of indices and values that were selected.

        Certain are headers, tensors that travel dense, a final flush, and steps of a warm-up that send all.
        """
        density, fixed = spec.policy().density, self.probes[-1].fixed
        times = Counter(density.at(exchange) for exchange in range(self.exchanges))
        whole = sum(count for each, count in times.items() if sent_whole(each))
        certain = whole * self.dense + (self.exchanges - whole) * fixed + self.flushed * self.dense
        selected = sum(count * self._selected(each) for each, count in times.items() if not sent_whole(each))
        return certain, self.factor * selected

    def total(self, spec: Spec, density: float) -> float:
        """Bytes of a run of a specification at another density."""
        return sum(self.parts(spec.with_(density=density)))

    def _selected(self, density: float) -> float:
        """Of one exchange, by the probes."""
        last = self.probes[-1]
        apart = math.log(last.density / self.probes[0].density)
        power = math.log(last.varying / self.probes[0].varying) / apart if abs(apart) > 0.05 else 1.0
        return last.varying * math.pow(density / last.density, min(max(power, 0.5), 1.5))


def exchanges_of(spec: Spec, rates: Sequence[float]) -> int:
    """How many exchanges a run makes whose steps have these learning rates."""
    choice = spec.policy().local_steps
    if choice is None:
        return len(rates)
    interval, made = Interval(choice), 0
    for rate in rates:
        interval.stepped([{"lr": rate}])
        if interval.full:
            made += 1
            interval.begin()
    return made


def steps_apart(spec: Spec) -> int:
    """How many steps lie between two exchanges, at the highest learning rate."""
    choice = spec.policy().local_steps
    return 1 if choice is None else choice.count


def density_of(spec: Spec) -> float:
    """The density of a specification, after warm-up."""
    return float(spec.policy().density.target)


@cache
def solve(spec: Spec, forecast: Forecast, budget: float) -> Spec | None:
    """The specification with the density at which a run sends nearly ``budget`` bytes.

    Returns:
        None where no density is low enough.
    """
    warmup = spec.policy().density.warmup
    low, high = LOWEST, warmup.start if warmup.steps else 1.0  # a warm-up thins out
    if forecast.total(spec, low) > AIM * budget:
        return None
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if forecast.total(spec, middle) > AIM * budget else (middle, high)
    return _with_density(spec, low)


@dataclass(frozen=True)
class Trial:
    """What a whole run sent at a density."""

    density: float
    sent: float


def next_spec(
    spec: Spec, forecast: Forecast, trials: Sequence[Trial], within: tuple[float, float], budget: float
) -> Spec:
    """What to run after some trials, of which there is at least one: another density, or one of the trials again.

    That means that it is the one. Bytes may jump where a density's rounding does: after some trials it is the nearest
    below the budget.
    """
    least, most = (share * budget for share in within)
    for trial in reversed(trials):
        if least <= trial.sent <= most:
            return _with_density(spec, trial.density)
    below = max((t for t in trials if t.sent <= budget), key=lambda t: t.density, default=None)
    above = min((t for t in trials if t.sent > budget), key=lambda t: t.density, default=None)
    if below and (len(trials) >= TRIES or (above and above.density < NARROW * below.density)):
        return _with_density(spec, below.density)
    wanted = _between(below, above, budget) if below and above else _corrected(spec, forecast, trials[-1], budget)
    wanted = density_of(_with_density(spec, wanted))
    if any(trial.density == wanted for trial in trials) or (not below and len(trials) >= TRIES):
        wanted = below.density if below else 0.97 * min(trial.density for trial in trials)
    return _with_density(spec, wanted)


def _between(below: Trial, above: Trial, budget: float) -> float:
    """The density between two trials, taken as a power of the bytes."""
    part = math.log(AIM * budget / below.sent) / math.log(above.sent / below.sent)
    return below.density * math.pow(above.density / below.density, min(max(part, 0.05), 0.95))


def _corrected(spec: Spec, forecast: Forecast, trial: Trial, budget: float) -> float:
    """The density that the forecast gives once it is scaled to agree with a trial."""
    certain, selected = forecast.parts(spec.with_(density=trial.density))
    factor = max((trial.sent - certain) / selected, 0.01) if selected else 1.0
    found = solve(spec, replace(forecast, factor=factor), budget)
    return LOWEST if found is None else density_of(found)


def _with_density(spec: Spec, density: float) -> Spec:
    return spec.with_(density=float(f"{density:.4g}"))


def with_local_steps(spec: Spec, rates: Sequence[float], exchange: float, budget: float) -> Spec | None:
    """The specification with the local steps between two exchanges of ``exchange`` bytes at which a run fits.

    As many exchanges as fit, evenly over all the steps: what is left over after the last is not shared, so it is to be
    little.

    Returns:
        None where a single exchange is too much.
    """
    most = int(budget // exchange)
    if not most:
        return None
    choice = spec.policy().local_steps
    growing = choice is not None and choice.growth > 0
    # Equal intervals are the longest with as many at once; of those that grow, from somewhat too short on.
    apart = int(0.9 * exchanges_of(spec.exchanging_every(1), rates) / (most + 1)) if growing else len(rates) // most
    apart = max(1, apart)
    fitting = spec.exchanging_every(apart)
    while (made := exchanges_of(fitting, rates)) > most:
        apart += 1
        fitting = spec.exchanging_every(apart)
    while growing and made:  # the longest with as many
        longer = spec.exchanging_every(apart + 1)
        if exchanges_of(longer, rates) < made:
            break
        apart, fitting = apart + 1, longer
    return fitting
