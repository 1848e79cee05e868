"""What may be chosen from, and how careful the choice is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringprune.comm.communicator import Communicator
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.momentum import takes_over
from ringprune.policies import IWP, Dense, Policy, as_policy, check_abilities
from ringprune.prediction import check_predictable
from ringprune.recommended import recommended
from ringprune.validation import real_number

__all__ = ["Auto", "as_choice", "called", "names_of"]

_DENSE = (Dense(), Dense("bf16"))
_PACKED = (IWP(0.1, roots="all", values="bf16"), IWP(0.01, roots="all", values="bf16"))


@dataclass(frozen=True)
class Auto:
    """Exchange as is predicted, and then measured, to be the fastest on the links and processors at hand.

    Training begins with the first candidate. After some steps the ranks measure their collectives and processors,
    predict a step with each candidate, and agree on one; what is chosen is timed, and left again where it is slower
    than it was said to be. All of it is repeated while training goes on. A candidate that is left sends all that it has
    kept back, so that nothing is lost.

    Args:
        candidates: policies, first the one that leaves nothing out, then those that leave least out. None: dense in
            float32, dense in bfloat16, and with ``torch.optim.SGD`` also IWP at 10 % and at 1 %, values in bfloat16.
            Other optimizers lose accuracy with gradients that are kept back; give candidates to have them all the same.
        margin: share by which a candidate has to be faster than what leaves less out.
        share: of training time that measuring again may take.

    Raises:
        ConfigurationError, ArgumentTypeError: a candidate is no policy, or cannot be predicted or left again.
    """

    candidates: Sequence[Policy] | None = None
    margin: float = 0.03
    share: float = 0.01

    def __post_init__(self) -> None:
        real_number("margin", self.margin, least=0)
        real_number("share", self.share, above=0, most=1)
        if self.candidates is not None:
            if not isinstance(self.candidates, Iterable):
                raise ArgumentTypeError(
                    f"Auto(candidates={self.candidates!r}): several policies, such as (Dense(), IWP(0.01))"
                )
            object.__setattr__(self, "candidates", tuple(self.candidates))
            if not self.candidates:
                raise ConfigurationError("Auto(candidates=()): give one policy or more, such as (Dense(), IWP(0.01))")
            for policy in self.candidates:
                _check(policy)

    def policies(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> Sequence[Policy]:
        """What is chosen from with this optimizer, over this communicator.

        Raises:
            ConfigurationError: a candidate that was asked for needs what the communicator cannot do, or goes with no
                dampening.
        """
        if self.candidates is not None:
            for policy in self.candidates:
                check_abilities(policy, comm)
                takes_over(optimizer, policy.correction)
            return self.candidates
        plain = type(optimizer) is torch.optim.SGD and not any(group["dampening"] for group in optimizer.param_groups)
        packed = _PACKED if plain else ()
        return tuple(policy for policy in (*_DENSE, *packed) if policy.needs <= comm.abilities)


def _check(policy: Any) -> None:
    if not isinstance(policy, Policy):
        raise ArgumentTypeError(f"Auto(candidates=...) holds {policy!r}: policies, such as ringprune.IWP(0.01)")
    check_predictable(policy)
    if policy.density.warmup.steps:
        raise ConfigurationError(
            f"Auto(candidates=...): {policy.name!r} with a warm-up: what is timed in it says nothing about the steps "
            "after it. Leave it away: training begins with the first candidate"
        )
    if policy.local_steps is not None or policy.low_pass < 1:
        slot = "local_steps" if policy.local_steps is not None else "low_pass"
        raise ConfigurationError(
            f"Auto(candidates=...): {policy.name!r} with {slot}={getattr(policy, slot)!r} trains otherwise, and cannot "
            "be left in the middle without a trace; choose it by yourself, with ringprune advise"
        )


def as_choice(policy: Any, optimizer: torch.optim.Optimizer, given: Mapping[str, bool]) -> tuple[Policy, Auto | None]:
    """The policy that training begins with, and what chooses others; None where nothing does.

    Args:
        policy: what the wrapper was given; None for the defaults of IWP, which exchange gradients as Horovod does.
        optimizer: what it wraps.
        given: whether it was given arguments that only a policy of one's own choice can go with, by name.

    Raises:
        ConfigurationError, ArgumentTypeError: it is neither a policy nor an Auto nor a name of one.
    """
    if policy == "auto":
        policy = Auto()
    if not isinstance(policy, Auto):
        if policy is None:
            return IWP(), None
        return recommended(optimizer) if policy == "iwp" else as_policy(policy), None
    for name, is_given in given.items():
        if is_given:
            raise ConfigurationError(
                f"{name} with policy=Auto(): what it takes is not predicted. Choose a policy by yourself, with "
                "ringprune advise"
            )
    return (_DENSE if policy.candidates is None else policy.candidates)[0], policy


def names_of(policies: Sequence[Policy]) -> list[str]:
    """What they are called, each otherwise."""
    names: list[str] = []
    for policy in policies:
        name = called(policy)
        number = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({number + 1})" if number else name)
    return names


def called(policy: Policy) -> str:
    """A policy's name for people: ``IWP 1 % bf16``."""
    if policy.name == "dense":
        return "dense" if policy.dense_values == "fp32" else f"dense {policy.dense_values}"
    values = "" if policy.values == "fp32" else f" {policy.values}"
    return f"{policy.name.upper()} {100 * policy.density.target:g} %{values}"
