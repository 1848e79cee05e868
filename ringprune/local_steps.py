"""Update mode: how many steps lie between two exchanges, what these moved, and the outer step on what was exchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.errors import ArgumentTypeError
from ringprune.validation import flag, one_of, real_number, whole_number

__all__ = ["Interval", "LocalSteps", "OuterStep", "as_local_steps", "exact_copy", "moved_by", "way"]

MOST = 16
"""How many times ``count`` steps an interval has at the most, however small its learning rate."""


@dataclass(frozen=True)
class LocalSteps:
    """Step locally ``count`` times, then exchange what the weights have moved by.

    With the averages ``X`` of what the ranks sent, the shared weights ``w`` make the outer step ::

        u = outer_momentum * u + X
        w = w - outer_lr * (X + outer_momentum * u  if nesterov else  u)

    which is ``w - X`` as it stands. Outer momentum is that of DiLoCo (Douillard and others, arXiv 2311.08105).

    The wrapped optimizer's own momentum is private to a rank, and carries the noise of one rank's batches from interval
    to interval. With ``momentum="mean"`` it is set, where something was exchanged, to the speed at which the ranks have
    moved on average (:class:`~ringprune.shared_momentum.SharedMomentum`): that costs no bytes, and one number of memory
    per entry. It is the speed of the interval's middle; ``"shared"`` brings it up to date.

    Where the learning rate falls, so does what a local step changes, and exchanges may be farther apart. With
    ``growth`` there is one each time that this sum over all steps passes a multiple of ``count``::

        sum of (lr / the highest lr so far) ** growth

    so every ``count`` steps at the highest rate, and every 16 times as many at the least. ``growth=2`` is the quadratic
    synchronization rule of Gu, Lyu, Arora, Zhang and Huang (arXiv 2310.14423), ``growth=1`` its linear form. The
    learning rate has to be the same on all ranks.

    Args:
        count: steps of the wrapped optimizer from one exchange to the next, H; at least 1.
        outer_lr: learning rate of the outer step.
        outer_momentum: its momentum; 0 keeps no buffer.
        nesterov: whether that is Nesterov's.
        momentum: the wrapped optimizer's: each rank's ``"own"``, or ``"shared"`` or ``"mean"`` for SGD with momentum,
            Adam and AdamW; other optimizers keep theirs.
        growth: how the steps between exchanges grow as the largest learning rate of any param group falls; 0: not.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
    """

    count: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True
    momentum: Literal["own", "shared", "mean"] = "own"
    growth: float = 0.0

    def __post_init__(self) -> None:
        whole_number("local_steps", self.count, 1)
        real_number("outer_lr", self.outer_lr, above=0)
        real_number("outer_momentum", self.outer_momentum, least=0, below=1)
        flag("nesterov", self.nesterov)
        one_of("momentum", self.momentum, ("own", "shared", "mean"))
        real_number("growth", self.growth, least=0)
        object.__setattr__(self, "growth", float(self.growth))  # 1 and 1.0 are one choice, and have one name

    @property
    def shares_momentum(self) -> bool:
        """Whether ranks learn each other's momentum from what is exchanged."""
        return self.momentum != "own"


def as_local_steps(local_steps: int | LocalSteps | None) -> LocalSteps | None:
    """The slot from what a policy's function takes.

    Raises:
        ArgumentTypeError, ConfigurationError: it is no number of steps.
    """
    if local_steps is None or isinstance(local_steps, LocalSteps):
        return local_steps
    if isinstance(local_steps, bool) or not isinstance(local_steps, int):
        raise ArgumentTypeError(f"local_steps={local_steps!r}: a whole number, a ringprune.LocalSteps, or None")
    return LocalSteps(local_steps)


class Interval:
    """The steps that were made since the last exchange, and whether the next one is due.

    Args:
        choice: how many steps lie between two exchanges.

    Attributes:
        steps: made by this rank since the last exchange.
    """

    def __init__(self, choice: LocalSteps) -> None:
        self._choice = choice
        self.steps = 0
        self._gone = torch.zeros((), dtype=torch.float64, device="cpu")
        self._highest = torch.zeros((), dtype=torch.float64, device="cpu")

    def stepped(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """A step was made, or left out on this rank alone: intervals are counted alike on all.

        Args:
            groups: the optimizer's param groups, for their learning rates.
        """
        self.steps += 1
        if self._choice.growth:
            rate = max(float(group["lr"]) for group in groups)
            self._highest.clamp_(min=rate)
            share = rate / float(self._highest) if self._highest else 1.0
            self._gone += share**self._choice.growth

    @property
    def full(self) -> bool:
        """Whether an exchange is due."""
        count = self._choice.count
        if not self._choice.growth:
            return self.steps >= count
        return float(self._gone) >= count or self.steps >= MOST * count

    def agree(self, comm: Communicator) -> None:
        """Count on from where rank 0 is, after a flush: some may have missed the steps of the highest rate.

        Args:
            comm: the ranks.
        """
        if self._choice.growth:
            numbers = torch.stack([self._gone, self._highest])
            gone, highest = comm.broadcast(numbers, 0, name="local steps").wait()
            self._gone.copy_(gone)
            self._highest.copy_(highest)

    def begin(self) -> None:
        """Another one; what was more than ``count`` counts for it."""
        self.steps = 0
        self._gone.sub_(self._choice.count).clamp_(min=0)

    @property
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the number of steps."""
        return {"gone": self._gone, "highest": self._highest} if self._choice.growth else {}


class OuterStep:
    """Moves the shared weights by what was exchanged.

    Args:
        choice: its rate and momentum.
        shared: the shared weights; changed by :meth:`apply`.
    """

    def __init__(self, choice: LocalSteps, shared: Sequence[Tensor]) -> None:
        self._choice, self._shared = choice, list(shared)
        self.momentum = [torch.zeros_like(weight) for weight in shared] if choice.outer_momentum else []

    @torch.no_grad()
    def apply(self, averages: Sequence[Tensor], *, coasting: bool) -> None:
        """One outer step; equal on all ranks, as averages and momentum are. ``averages`` may be overwritten.

        Args:
            averages: of what the ranks sent.
            coasting: outer momentum takes part. Not where no rank has made a step since the last time, as in a flush:
                else the weights would move on by themselves.
        """
        step, choice = list(averages), self._choice
        if not step:
            return  # everything that is trained is exchanged elsewhere
        if self.momentum and coasting:
            torch._foreach_mul_(self.momentum, choice.outer_momentum)
            torch._foreach_add_(self.momentum, step)
            if choice.nesterov:
                torch._foreach_add_(step, self.momentum, alpha=choice.outer_momentum)
            else:
                step = self.momentum
        torch._foreach_sub_(self._shared, step, alpha=choice.outer_lr)


def exact_copy(param: Tensor) -> Tensor:
    """A copy of a parameter, contiguous, float32 or float64."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return param.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def way(shared: Tensor, param: Tensor) -> tuple[Tensor, Tensor]:
    """From where a parameter set out to where it has come to; contiguous, in the dtype of its shared weight.

    A 16-bit parameter set out from its shared weight rounded: what that dropped is no movement.
    """
    start = shared if shared.dtype == param.dtype else shared.to(param.dtype).to(shared.dtype)
    return start, param.detach().to(shared.dtype).contiguous()


def moved_by(shared: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """How far parameters have gone, as gradients count it: shared weights less what became of them. Contiguous."""
    pairs = list(zip(shared, params, strict=True))
    if pairs and all(weight.dtype == param.dtype for weight, param in pairs):
        return [tensor.contiguous() for tensor in torch._foreach_sub(list(shared), list(params))]
    return [start - end for start, end in (way(weight, param) for weight, param in pairs)]
