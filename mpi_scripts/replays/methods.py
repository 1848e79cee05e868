"""What is replayed: plain Horovod, nothing at all, and RingPrune's policies."""

import difflib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from exchanges.errors import CannotRun
from exchanges.job import Job

import ringprune as rp
from replays.model import Nothing, Waiting
from replays.noting import Noting
from ringprune.errors import ConfigurationError
from ringprune.simulation.spec import parse

__all__ = ["ALONE", "COMMUNICATORS", "DEFAULTS", "HOROVOD", "Method", "Replayed", "named", "policy_of"]

HOROVOD, ALONE, AUTO, PRIORITY = "horovod", "alone", "auto", "@priority"
DEFAULTS = (HOROVOD, "dense", "p3")
COMMUNICATORS = ("horovod", "mpi", "torch")


class Replayed(Protocol):
    """A method on one rank."""

    def step(self) -> None:
        """What follows the backward pass."""
        ...

    def auto(self) -> dict[str, Any]:
        """What it has measured, predicted and chosen; ``deciding`` is alike on all ranks. Empty where nothing is."""
        ...

    def finish(self) -> None:
        """Wait until nothing is under way, and nothing is left to be done."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


@dataclass(frozen=True)
class Method:
    """One line of the table.

    Attributes:
        name: as it was asked for: ``"horovod"``, ``"alone"`` (no exchange at all), or a policy with its arguments.
        build: makes it on each rank.
    """

    name: str
    build: Callable[[Job, Waiting, str], Replayed]


class _Alone:
    def __init__(self, model: Waiting) -> None:
        self._model = model

    def step(self) -> None:
        self._model.zero_grad()

    def auto(self) -> dict[str, Any]:
        """Nothing is chosen."""
        return {}

    def finish(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class _Wrapped:
    """A wrapped optimizer, Horovod's or ours, in the usual loop."""

    def __init__(self, optimizer: Any, close: Callable[[], None], finish: Callable[[], None]) -> None:
        self._optimizer, self._close, self._finish = optimizer, close, finish

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def auto(self) -> dict[str, Any]:
        """What a policy that chooses by itself tells."""
        found: dict[str, Any] = getattr(self._optimizer, "stats", dict)().get("auto", {})
        return found

    def finish(self) -> None:
        self._finish()

    def close(self) -> None:
        self._close()
        del self._optimizer, self._close, self._finish
        gc.collect()


def _horovod(job: Job, model: Waiting, communicator: str) -> Replayed:
    hvd = _initialised()
    optimizer = hvd.DistributedOptimizer(Nothing(model.parameters()), named_parameters=model.named_parameters())
    return _Wrapped(optimizer, lambda: None, lambda: None)


def _ringprune(policy: rp.Policy | rp.Auto) -> Callable[[Job, Waiting, str], Replayed]:
    def build(job: Job, model: Waiting, communicator: str) -> Replayed:
        if communicator == "horovod":
            _initialised()
        elif communicator == "torch":
            job.join_torch()
        comm = Noting(rp.connect(communicator), model.note)
        optimizer = rp.DistributedOptimizer(
            Nothing(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )

        def close() -> None:
            optimizer.close()
            comm.close()

        # Only a schedule leaves something under way after step().
        schedules = isinstance(policy, rp.Policy) and policy.schedule is not None
        finish = optimizer.synchronize if schedules else lambda: None
        return _Wrapped(optimizer, close, finish)

    return build


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names; ``auto`` chooses from the policies among them.

    Raises:
        ValueError: one is neither Horovod, ``alone`` nor a policy; says which there are.
    """
    found = [_named(name) for name in dict.fromkeys(names) if name != AUTO]
    if AUTO not in names:
        return found
    policies = [policy_of(method.name) for method in found if method.name not in (HOROVOD, ALONE)]
    try:
        auto = rp.Auto(tuple(policies))
    except ConfigurationError as error:
        raise ValueError(f"{AUTO} chooses from the other methods that are replayed: {error}") from error
    return [*found, Method(AUTO, _ringprune(auto))]


def policy_of(text: str) -> rp.Policy:
    """The policy of a name with arguments; ``@priority`` behind it schedules what it sends.

    Raises:
        ConfigurationError: there is none.
    """
    policy = parse(text.removesuffix(PRIORITY)).policy()
    return replace(policy, schedule=rp.LayerPriority()) if text.endswith(PRIORITY) else policy


def _named(name: str) -> Method:
    if name == HOROVOD:
        return Method(name, _horovod)
    if name == ALONE:
        return Method(name, lambda job, model, communicator: _Alone(model))
    try:
        policy_of(name)
    except ConfigurationError as error:
        near = difflib.get_close_matches(name, (HOROVOD, ALONE), n=1)
        raise ValueError(f"{error}{f'; did you mean {near[0]}?' if near else ''}") from error
    return Method(name, _ringprune(policy_of(name)))


def _initialised() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise CannotRun(f"Horovod cannot be used here ({error})") from error
    if not hvd.is_initialized():
        hvd.init()
    return hvd
