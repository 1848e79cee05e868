"""RingPrune's exchanges, by the name of the policy."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import ringprune as rp
from exchanges.choice import Choice
from exchanges.exchange import Account, Exchange
from exchanges.gradients import Gradients
from exchanges.job import Job
from exchanges.messages import Recorder
from ringprune.comm import Communicator
from ringprune.policies import POLICIES

__all__ = ["RingPrune", "formats", "made", "policy"]

COMPUTING = ("accumulate", "select", "pack", "unpack")
"""Stages that wait for no other rank."""


class RingPrune:
    """``ringprune.DistributedOptimizer`` on plain SGD with momentum 0.9."""

    def __init__(
        self, module: Gradients, chosen: rp.Policy, comm: Communicator, seed: int, bucket_bytes: int | None = None
    ) -> None:
        self._module = module
        self.messages = Recorder(comm)
        self._optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            named_parameters=module.named_parameters(),
            policy=chosen,
            comm=self.messages,
            seed=seed,
            **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}),
        )

    def prepare(self) -> Tensor:
        """The forward pass."""
        loss: Tensor = self._module()
        return loss

    def run(self, loss: Tensor) -> None:
        """Backward, in which exchanges start, and the rest of the exchange; no step is made."""
        loss.backward()
        self._optimizer.synchronize()

    def account(self) -> Account:
        """From the optimizer's stats."""
        stats = self._optimizer.stats()
        return Account(
            sent=stats["bytes_sent"],
            values=stats["bytes_values"] + stats["bytes_dense"],
            computing=sum(stats["seconds"].get(stage, 0.0) for stage in COMPUTING),
            density=stats["density"],
            realised_density=stats["realised_density"],
        )

    def close(self) -> None:
        """Remove the hooks and close the communicator."""
        self._optimizer.close()
        self.messages.close()


def formats(name: str, choice: Choice) -> dict[str, str]:
    """The number formats chosen, as the arguments of that policy; ``values`` where it sends everything whole."""
    given = {key: value for key in ("values", "dense_values") if (value := getattr(choice, key)) is not None}
    taken = inspect.signature(POLICIES[name]).parameters
    if "values" in taken and "dense_values" not in taken and "dense_values" in given:
        given["values"] = given.pop("dense_values")
    return given


def made(name: str, choice: Choice, settings: Mapping[str, Any]) -> rp.Policy:
    """The policy of that name, with what was chosen for it, past its warm-up from the first step on."""
    given: dict[str, Any] = {"density": choice.density, "warmup": rp.Warmup(steps=0), **settings}
    given |= formats(name, choice)
    taken = inspect.signature(POLICIES[name]).parameters
    # Dense has no density, and what it is not told of it does not need; a value format it must be told.
    optional = {"density", "warmup"}
    return POLICIES[name](**{key: value for key, value in given.items() if key in taken or key not in optional})


def policy(name: str, settings: Mapping[str, Any]) -> Callable[[Job, Gradients, Choice], Exchange]:
    """What builds the exchange of the policy of that name, with settings beside those of the command line."""

    def build(job: Job, module: Gradients, choice: Choice) -> Exchange:
        if choice.communicator == "horovod":
            import horovod.torch as hvd

            hvd.init()
        elif choice.communicator == "torch":
            job.join_torch()
        chosen, comm = made(name, choice, settings), rp.connect(choice.communicator)
        return RingPrune(module, chosen, comm, choice.seed, choice.bucket_bytes)

    return build
