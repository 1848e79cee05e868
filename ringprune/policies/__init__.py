"""Policies: one paper, one small file."""

import difflib
from collections.abc import Callable
from typing import Any

from ringprune.comm.communicator import Communicator
from ringprune.errors import ArgumentTypeError, ConfigurationError, RingPruneError
from ringprune.policies.dense import Dense
from ringprune.policies.dgc import DGC
from ringprune.policies.iwp import IWP
from ringprune.policies.mipd import MIPD
from ringprune.policies.oktopk import OkTopk
from ringprune.policies.p3 import P3
from ringprune.policies.parallax import Parallax
from ringprune.policies.policy import Policy
from ringprune.policies.random_k import RandomK
from ringprune.policies.scalecom import ScaleCom
from ringprune.policies.slim_dp import SlimDP

__all__ = [
    "DGC",
    "IWP",
    "MIPD",
    "P3",
    "POLICIES",
    "Dense",
    "OkTopk",
    "Parallax",
    "Policy",
    "RandomK",
    "ScaleCom",
    "SlimDP",
    "as_policy",
    "check_abilities",
]

POLICIES: dict[str, Callable[[], Policy]] = {
    "dense": Dense,
    "dgc": DGC,
    "iwp": IWP,
    "mipd": MIPD,
    "oktopk": OkTopk,
    "p3": P3,
    "parallax": Parallax,
    "random_k": RandomK,
    "scalecom": ScaleCom,
    "slim_dp": SlimDP,
}
"""Every policy by name, with its default settings."""

_AUTO = 'policy="auto" goes with ringprune.DistributedOptimizer alone; name a policy here'


def as_policy(policy: Policy | str) -> Policy:
    """A policy from itself or from its name.

    Raises:
        ConfigurationError: no policy has that name.
        ArgumentTypeError: it is neither a policy nor a name.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise _no_policy(policy)
    if policy not in POLICIES:
        if policy == "auto":
            raise ConfigurationError(_AUTO)
        name, _, settings = policy.partition(":")
        near = difflib.get_close_matches(name.lower().replace("-", "_"), [*POLICIES, "auto"], n=1)
        near = ["iwp"] if name == "recommended" else near  # ringprune.recommended() is what "iwp" gives
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if settings:
            hint = f"; settings are arguments of its function, such as ringprune.IWP({settings.replace(':', ', ')})"
        raise ConfigurationError(f"policy={policy!r}: one of {', '.join(map(repr, [*POLICIES, 'auto']))}{hint}")
    return POLICIES[policy]()


def _no_policy(given: Any) -> RingPruneError:
    if type(given).__name__ == "Auto":  # of a layer above this one
        return ConfigurationError(_AUTO)
    call = f"; call it: ringprune.{given.__name__}()" if given in POLICIES.values() else ""
    return ArgumentTypeError(
        f"policy={given!r}: a policy such as ringprune.IWP(density=0.01), or its name as a string{call}"
    )


def check_abilities(policy: Policy, comm: Communicator) -> None:
    """Check that a communicator can do what a policy needs.

    Raises:
        ConfigurationError: it cannot; names the policy, the ability and the communicator.
    """
    missing = policy.needs - comm.abilities
    if missing:
        raise ConfigurationError(
            f"policy {policy.name!r} needs {', '.join(sorted(missing))}, which the {comm.kind} communicator cannot do"
        )
    policy.roots.number(comm.size)
