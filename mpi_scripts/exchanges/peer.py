"""Somebody else's exchange: a function of an installed package, compared in the same job."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.exchange import Account, Exchange
from exchanges.gradients import Gradients
from exchanges.job import Job

__all__ = ["Ranks", "build"]


@dataclass(frozen=True)
class Ranks:
    """What the function is told of the job; mpi4py, Horovod or torch.distributed it starts itself.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        step: how many steps were made before.
        density: the share of entries that was asked for.
    """

    rank: int
    size: int
    step: int
    density: float


Function = Callable[[Mapping[str, Tensor], Ranks], None]


class _Peer:
    messages = None

    def __init__(self, module: Gradients, job: Job, choice: Choice, function: Function) -> None:
        self._module, self._job, self._function, self._density = module, job, function, choice.density
        self._steps = 0

    def prepare(self) -> Tensor:
        loss: Tensor = self._module()
        return loss

    def run(self, loss: Tensor) -> None:
        loss.backward()
        named = {
            name: parameter.grad for name, parameter in self._module.named_parameters() if parameter.grad is not None
        }
        self._function(named, Ranks(self._job.rank, self._job.size, self._steps, self._density))
        self._steps += 1

    def account(self) -> Account:
        return Account(sent=None, values=None, density=self._density, realised_density=self._density)

    def close(self) -> None:
        """Nothing of ours is held."""


def build(job: Job, module: Gradients, choice: Choice) -> Exchange:
    """The exchange by the function that ``--peer`` names.

    Raises:
        CannotRun: it cannot be imported.
    """
    where, _, name = (choice.peer or "").partition(":")
    sys.path.append(os.getcwd())
    try:
        function: Function = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotRun(f"--peer {choice.peer}: {type(error).__name__}: {error}") from error
    return _Peer(module, job, choice, function)
