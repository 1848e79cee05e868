"""What pays: which method, which buckets of it are better sent whole, and from which rate on nothing does."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ringprune.errors import ConfigurationError
from ringprune.plan import Bucket, Plan, Route
from ringprune.policies.policy import Policy
from ringprune.prediction.link import Link
from ringprune.prediction.step import Prediction, Setting, predict

__all__ = ["MARGIN", "Mixture", "best", "cheaper_route", "crossover", "mix"]

MARGIN = 0.05
"""A method has to be predicted faster by this share than what leaves less out: it costs accuracy and memory, and no
prediction is exact."""

ROUTES: tuple[Route, Route] = ("packed", "dense")

MIXTURES = 16
"""Places that are tried, of those up to which buckets are packed, before the neighbours of the best."""

SLOWEST, FASTEST = 1e6, 1e13
"""Rates in bit/s between which a crossover is looked for."""

PRECISION = 1.002
"""Of a crossover: more than any prediction has."""


@dataclass(frozen=True)
class Mixture:
    """A policy some of whose packed buckets are sent whole.

    Attributes:
        routes: of each bucket of the plan.
        dense: how many packed buckets are better sent whole.
        packed: how many packed buckets there are in the plan.
        prediction: of a step with these routes.
    """

    routes: tuple[Route, ...]
    dense: int
    packed: int
    prediction: Prediction


def cheaper_route(bucket: Bucket, policy: Policy, setting: Setting) -> tuple[Route, float]:
    """The cheaper way of a bucket that has nothing to hide behind.

    Returns:
        The route, and the seconds that it saves over the other one.
    """
    packed, dense = (setting.work_of(bucket, policy, route).seconds(setting.link, setting.ranks) for route in ROUTES)
    return ("packed", dense - packed) if packed < dense else ("dense", packed - dense)


def mix(setting: Setting, policy: Policy) -> Mixture:
    """Which packed buckets are better sent whole, so that the step is the shortest.

    Messages of some buckets are hidden by compute, those of others are not, so single buckets do not decide. They are
    put in an order, and packed from the first up to that place where the step is predicted to be the shortest: in the
    order of what packing saves, and from the last on, whose gradients come when no compute is left to hide behind.
    """
    plan = setting.plan(policy)
    gains: dict[int, float] = {}
    for bucket in plan.buckets:
        if bucket.route == "packed":
            route, saved = cheaper_route(bucket, policy, setting)
            gains[bucket.index] = saved if route == "packed" else -saved
    orders = sorted(gains, key=lambda index: -gains[index]), sorted(gains, reverse=True)
    mixtures = [_mixed_in(order, plan, setting, policy) for order in orders]
    return min(mixtures, key=lambda mixture: mixture.prediction.seconds)


def _mixed_in(order: Sequence[int], plan: Plan, setting: Setting, policy: Policy) -> Mixture:
    """The mixture of which the buckets before some place in ``order`` are packed, and the others whole."""

    @cache
    def mixture(packed: int) -> Mixture:
        whole = set(order[packed:])
        routes = tuple[Route, ...]("dense" if b.index in whole else b.route for b in plan.buckets)
        return Mixture(routes, len(whole), len(order), predict(setting, policy, routes))

    def shortest(places: Iterable[int]) -> int:
        return min(places, key=lambda packed: (mixture(packed).prediction.seconds, -packed))

    # A large model has hundreds of buckets: first in strides, then around what was best of those.
    stride = -(-(len(order) + 1) // MIXTURES)
    place = shortest([*range(0, len(order), stride), len(order)])
    around = range(max(0, place - stride), min(len(order), place + stride) + 1)
    return mixture(shortest(around) if stride <= MIXTURES else place)


def best(seconds: Mapping[str, float], margin: float = MARGIN) -> str:
    """The first method that no other one beats by more than ``margin``, and that beats the first of all by as much.

    Args:
        seconds: of a step, by method; first the one that leaves nothing out, then those that leave least out.
        margin: share of the faster one's time.
    """
    shortest, (first, whole) = min(seconds.values()), next(iter(seconds.items()))
    if whole <= (1 + margin) * shortest:
        return first
    paying = (name for name, taken in seconds.items() if (1 + margin) * taken < whole)
    return next(name for name in paying if seconds[name] <= (1 + margin) * shortest)


def crossover(
    setting: Setting,
    policy: Policy,
    against: Policy,
    *,
    link_of: Callable[[float], Link] = Link.of_rate,
    margin: float = MARGIN,
) -> float:
    """The rate from which on a policy no longer pays, for the first time: from slow links on, then by bisection.

    Args:
        setting: what is trained on what; its link is replaced.
        policy: what is to pay.
        against: what is compared with, usually ``Dense()``.
        link_of: the link of a rate in bit/s.
        margin: it pays while the other step is longer by more than this share.

    Returns:
        bit/s: 0 where it pays at no rate, infinity where it pays at every one.

    Raises:
        ConfigurationError: a policy cannot be predicted, or the margin is negative.
    """
    if margin < 0:
        raise ConfigurationError(f"margin={margin}: at least 0")

    def pays(bits_per_second: float) -> bool:
        there = replace(setting, link=link_of(bits_per_second))
        ours, theirs = predict(there, policy).seconds, predict(there, against).seconds
        return theirs > (1 + margin) * ours

    # Of local steps, which save what nothing hides, some pay, then do not, and then do again.
    low, high = 0.0, SLOWEST
    while pays(high):
        low, high = high, 2 * high
        if high > FASTEST:
            return math.inf
    if not low:
        return 0.0
    while high > PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
