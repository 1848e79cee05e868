"""The rows of an answer: what each method is predicted to take, and from which rate on it no longer pays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ringprune.bench.local_step import RECOMMENDED
from ringprune.policies import Dense, Policy
from ringprune.prediction import Link, Setting, best, crossover, mix, predict

__all__ = ["DENSE", "METHODS", "Row", "curve", "rows_of"]

Row = dict[str, Any]

DENSE = "dense"

METHODS = (
    DENSE,
    "dense:values=fp16",
    RECOMMENDED,
    "iwp:density=0.1",
    "iwp:density=0.01",
    "iwp:density=0.001",
    "dgc:density=0.001",
)
"""What is compared: first what leaves least out."""


def rows_of(setting: Setting, methods: Mapping[str, Policy], link_of: Callable[[float], Link]) -> list[Row]:
    """One row for each method, dense first.

    Args:
        setting: what is trained on what.
        methods: by name, first those that leave least out; dense is among them.
        link_of: the link of a rate in bit/s.

    Raises:
        ConfigurationError: a method cannot be predicted.
    """
    rows = [_row(setting, name, policy, link_of) for name, policy in methods.items()]
    chosen = best({row["method"]: row["seconds"] for row in rows})
    dense = next(row for row in rows if row["method"] == DENSE)
    for row in rows:
        row["speedup"] = dense["seconds"] / row["seconds"]
        row["wire_ratio"] = dense["bytes_per_rank"] / row["bytes_per_rank"] if row["bytes_per_rank"] else None
        row["best"] = row["method"] == chosen
    return rows


def curve(setting: Setting, policy: Policy, rates: list[float], link_of: Callable[[float], Link]) -> list[float]:
    """Seconds of a step at each rate in bit/s."""
    return [predict(replace(setting, link=link_of(rate)), policy).seconds for rate in rates]


def _row(setting: Setting, name: str, policy: Policy, link_of: Callable[[float], Link]) -> Row:
    found = predict(setting, policy)
    mixture = mix(setting, policy)
    below = 0.0 if name == DENSE else crossover(setting, policy, Dense(), link_of=link_of)
    return {
        "model": setting.workload.model,
        "entries": setting.workload.entries,
        "ranks": setting.ranks,
        "method": name,
        "seconds": found.seconds,
        "compute_seconds": found.compute_seconds,
        "exposed_seconds": found.exposed_seconds,
        "local_seconds": found.local_seconds,
        "network_seconds": found.network_seconds,
        "bytes_per_rank": sum(found.bytes_sent.values()),
        "pays_below": None if name == DENSE or below == math.inf else below,
        "pays_everywhere": below == math.inf,
        "packed_buckets": mixture.packed,
        "buckets_better_dense": mixture.dense,
        "mixed_seconds": mixture.prediction.seconds,
    }
