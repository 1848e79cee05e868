"""What is chosen, from what was measured: pure functions, so that it can be tested without any rank."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringprune.plan import ParamSpec
from ringprune.policies import Policy
from ringprune.prediction import MeasuredLink, Prediction, Setting, Workload, best, mix, predict
from ringprune.prediction.workload import Layer
from ringprune.routing import LargeMatrices, Named
from ringprune.timeline import Times

__all__ = ["Option", "as_exchanged", "choose", "options", "sentence", "workload_of"]

TRUST = 1.15
"""A candidate that may be faster than predicted by this factor is tried before it is dismissed."""

TRIALS = 3
"""Candidates that are tried in one round, that which training is with included."""

MIXED = 0.1
"""Share by which a step has to be predicted faster with some packed buckets whole: the times of both ways are wrong by
that much, each in its own direction, and what comes of it is timed only against other candidates."""


@dataclass(frozen=True)
class Option:
    """A candidate, predicted.

    Attributes:
        policy: as it would be exchanged: buckets that are better sent whole travel dense.
        prediction: of a step.
        dense: how many of its packed buckets those are.
        packed: of how many.
    """

    policy: Policy
    prediction: Prediction
    dense: int = 0
    packed: int = 0


def workload_of(specs: Sequence[ParamSpec], times: Sequence[Times]) -> Workload:
    """What is trained, one layer for each parameter, from the times of all ranks: of each the longest.

    Buckets are exchanged in the order of the parameters, from the last on: a gradient that comes before those of later
    parameters waits for them, and so it counts as theirs.
    """
    layers: list[Layer] = []
    ready_at = [max(ready) for ready in zip(*(rank.ready for rank in times), strict=True)]
    before = since = min((ready for ready in ready_at if ready), default=0.0)
    for spec, ready in zip(reversed(specs), reversed(ready_at), strict=True):
        until = max(since, ready)
        layers.insert(0, Layer(spec.name, (spec.shape,), 0.0, until - since))
        since = until
    # What follows the last gradient, the optimizer's step and the loading of data, hides nothing: nor does forward.
    layers[0] = replace(layers[0], forward_seconds=before + max(0.0, max(rank.compute for rank in times) - since))
    return Workload("the model", tuple(layers), "measured now", tuple(specs))


def options(setting: Setting, policies: Sequence[Policy]) -> list[Option]:
    """Every candidate with its prediction, and with those buckets whole that are better sent whole."""
    return [_option(setting, policy) for policy in policies]


def _option(setting: Setting, policy: Policy) -> Option:
    plan = setting.plan(policy)
    if all(bucket.route == "dense" for bucket in plan.buckets):
        return Option(policy, predict(setting, policy))
    mixture, whole = mix(setting, policy), predict(setting, policy)
    pays = (1 + MIXED) * mixture.prediction.seconds < whole.seconds
    # With nothing packed it would be dense by another name; what somebody chose by name is left as it is.
    if mixture.dense in (0, mixture.packed) or not pays or not isinstance(policy.routing, LargeMatrices):
        return Option(policy, whole, 0, mixture.packed)
    routed = zip(plan.buckets, mixture.routes, strict=True)
    packed = [plan.params[i].name for bucket, route in routed if route == "packed" for i in bucket.members]
    return Option(packing(policy, packed), mixture.prediction, mixture.dense, mixture.packed)


def as_exchanged(setting: Setting, candidate: Policy, policy: Policy) -> Option:
    """A candidate as training is with it: ``policy``, which may pack fewer buckets."""
    packed, now = (sum(b.route == "packed" for b in setting.plan(p).buckets) for p in (candidate, policy))
    return Option(policy, predict(setting, policy), packed - now, packed)


def packed_of(policy: Policy) -> list[str] | None:
    """The parameters that are packed, where :func:`packing` has chosen them; None where the policy's routing does."""
    routing = policy.routing
    return list(routing.names) if isinstance(routing, Named) else None


def packing(policy: Policy, names: Iterable[str] | None) -> Policy:
    """A candidate of which only these parameters are packed; None, or one that chooses by name, leaves it as it is."""
    routing = policy.routing
    if names is None or not isinstance(routing, LargeMatrices):
        return policy
    return replace(policy, routing=Named(tuple(names), routing))


def choose(
    predicted: Sequence[float],
    compute: float,
    ratios: Mapping[int, float],
    tried: Collection[int],
    settled: int,
    *,
    margin: float,
    hysteresis: float,
) -> int:
    """Which candidate comes next: the one that stays, or one that is to be tried before that is known.

    Args:
        predicted: seconds of a step with each, as predicted now.
        compute: seconds of a step without any exchange, which none can be faster than.
        ratios: of those that have been timed at any time, what they took over what was predicted then.
        tried: which have been timed in this round.
        settled: the one that training was with when the round began.
        margin: share by which a candidate has to be faster than what leaves less out.
        hysteresis: the share by which it has to be faster than ``settled``.
    """
    expected = [seconds * ratios.get(i, 1.0) for i, seconds in enumerate(predicted)]

    def best_of(among: Iterable[int]) -> int:
        found = int(best({str(i): expected[i] for i in sorted(among)}, margin))
        return settled if expected[settled] <= (1 + hysteresis) * expected[found] else found

    chosen = best_of(range(len(expected)))
    if chosen not in tried:
        return chosen if len(tried) < TRIALS else best_of(tried)
    # No prediction is exact: the best of the others may be better than what it was compared with.
    enough = (1 + max(margin, hysteresis)) * max(1.0, compute / expected[chosen])
    others = [i for i in range(len(expected)) if i not in tried and i not in ratios]
    hopeful = [i for i in others if enough * max(compute, expected[i] / TRUST) < expected[chosen]]
    if hopeful and len(tried) < TRIALS:
        return min(hopeful, key=lambda i: (expected[i], i))
    return chosen


def sentence(
    found: Sequence[Option],
    names: Sequence[str],
    chosen: int,
    seconds: Mapping[int, float],
    link: MeasuredLink,
    entries: int,
) -> str:
    """What was decided, and by what, in one line."""
    option, first = found[chosen], found[0]
    words = [f"link {8e-9 * link.bytes_per_second:.3g} Gbit/s x {link.ranks}, {entries:,} entries"]
    words[0] += f": {names[chosen]}"
    words[0] += f" ({option.dense} of {option.packed} packed buckets stay dense)" if option.dense else ""
    if chosen:
        compute = _ms(first.prediction.compute_seconds)
        words[0] += f", predicted to add {_ms(option.prediction.exposed_seconds)} to the {compute} of compute in a step"
        words[0] += f", against {_ms(first.prediction.exposed_seconds)} {names[0]}"
    else:
        words[0] += ", nothing else is faster by enough"
        words.append("predicted: " + _listed(names, dict(enumerate(o.prediction.seconds for o in found))))
    return "; ".join([*words, "timed: " + _listed(names, seconds)])


def _listed(names: Sequence[str], seconds: Mapping[int, float]) -> str:
    return ", ".join(f"{names[i]} {_ms(taken)}" for i, taken in sorted(seconds.items()))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
