"""What is replayed: plain Horovod, nothing at all, and RingPrune's policies."""

import difflib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from exchanges.errors import CannotRun
from exchanges.job import Job
from torch import Tensor

import ringprune as rp
from replays.model import Nothing, Waiting, still_sgd
from replays.noting import Noting
from ringprune.errors import ConfigurationError
from ringprune.priority_mode import PriorityMode
from ringprune.simulation import spec

__all__ = [
    "ALONE",
    "COMMUNICATORS",
    "DEFAULTS",
    "HOROVOD",
    "Method",
    "Outputs",
    "Replayed",
    "Wrapped",
    "named",
    "policy_of",
]

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


class Outputs:
    """Tensors for averages of what is packed, so that they do not overwrite the gradients that are replayed.

    Who chooses by value would else choose from what the step before has left, the same few entries on all ranks, and
    send a part of what its density says. Sums of dense gradients stay where these are: whatever they hold, all travels,
    until something is chosen that is not dense.

    Args:
        model: whose gradients they are.
    """

    def __init__(self, model: Waiting) -> None:
        self._model = model
        self._tensors: dict[int, Tensor] = {}
        self._mode: Any = None
        self._overwritten = False

    def give(self, optimizer: Any) -> None:
        """After the backward pass, before the step of ours."""
        mode = optimizer._mode
        packed = {i for bucket in mode.plan.buckets if bucket.route == "packed" for i in bucket.members}
        if packed and (isinstance(mode, PriorityMode) or not mode._overlap):
            # Layers take averages over as they come, long after; what clips by the norm of all has read nothing yet.
            self._model.refresh()
            return
        self._overwritten = bool(packed) and mode.timeline is not None  # nothing is read before the step then
        for i in packed if not self._overwritten else ():
            if i not in self._tensors:
                self._tensors[i] = torch.empty_like(mode.params[i])
            # Not .grad: another tensor there is a change of the gradient. It was read in the backward pass.
            mode.params[i].grad.data = self._tensors[i]

    def renew(self, optimizer: Any) -> None:
        """After the step of ours: with another exchange than before, gradients are again those of this rank."""
        if self._overwritten or (self._mode is not None and optimizer._mode is not self._mode):
            self._model.write()
        self._mode = optimizer._mode


class Wrapped:
    """A wrapped optimizer, Horovod's or ours, in the usual loop."""

    def __init__(
        self,
        optimizer: Any,
        close: Callable[[], None] = lambda: None,
        finish: Callable[[], None] = lambda: None,
        outputs: Outputs | None = None,
    ) -> None:
        self._optimizer, self._close, self._finish, self._outputs = optimizer, close, finish, outputs

    def step(self) -> None:
        """What follows the backward pass."""
        if self._outputs is not None:
            self._outputs.give(self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._outputs is not None:
            self._outputs.renew(self._optimizer)

    def auto(self) -> dict[str, Any]:
        """What a policy that chooses by itself tells."""
        found: dict[str, Any] = getattr(self._optimizer, "stats", dict)().get("auto", {})
        return found

    def finish(self) -> None:
        """Make what is left of the last step."""
        self._finish()

    def close(self) -> None:
        """Let go of everything."""
        self._close()
        del self._optimizer, self._close, self._finish, self._outputs
        gc.collect()


def _horovod(job: Job, model: Waiting, communicator: str) -> Replayed:
    hvd = _initialised()
    optimizer = hvd.DistributedOptimizer(Nothing(model.parameters()), named_parameters=model.named_parameters())
    return Wrapped(optimizer)


def _ringprune(policy: rp.Policy | rp.Auto) -> Callable[[Job, Waiting, str], Replayed]:
    def build(job: Job, model: Waiting, communicator: str) -> Replayed:
        if communicator == "horovod":
            _initialised()
        elif communicator == "torch":
            job.join_torch()
        comm = Noting(rp.connect(communicator), model.note)
        optimizer = rp.DistributedOptimizer(
            still_sgd(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model
        )

        def close() -> None:
            optimizer.close()
            comm.close()

        # Only a schedule leaves something under way after step().
        schedules = isinstance(policy, rp.Policy) and policy.schedule is not None
        finish = optimizer.synchronize if schedules else lambda: None
        return Wrapped(optimizer, close, finish, Outputs(model))

    return build


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names; ``auto`` chooses from the policies among them.

    Raises:
        ValueError: one is neither Horovod, ``alone`` nor a policy, or ``auto`` has nothing to choose from; says which.
    """
    found = [_named(name) for name in dict.fromkeys(names) if name != AUTO]
    if AUTO not in names:
        return found
    candidates = [method.name for method in found if method.name not in (HOROVOD, ALONE)]
    if len(candidates) == 1:
        raise ValueError(f"{AUTO} would be {candidates[0]} itself: give it another method to choose from")
    try:
        auto = rp.Auto(tuple(map(policy_of, candidates)))
    except ConfigurationError as error:
        raise ValueError(f"{AUTO} chooses from the other methods that are replayed: {error}") from error
    return [*found, Method(AUTO, _ringprune(auto))]


def policy_of(text: str) -> rp.Policy:
    """The policy of a name with arguments; ``@priority`` behind it schedules what it sends.

    Raises:
        ConfigurationError: there is none.
    """
    policy = spec.policy_of(text.removesuffix(PRIORITY))
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
