"""Momentum that ranks share without a message: the speed at which they have moved on average, brought up to date."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from ringprune import ops
from ringprune.local_steps import way
from ringprune.ops import Adams
from ringprune.ops.checks import FLOAT32_MAX, FLOATS
from ringprune.ops.share_momentum import share_momentum_reference

__all__ = ["SharedMomentum"]

KEPT = 2
"""Steps of an interval up to which all that a rank's momentum has changed by is kept."""

ROOM = 1 << 24
"""Entries of which there are copies at a time, of parameters of another dtype or layout than their shared weights."""

SHARPLY = 1 / 64
FADING = 0.9
"""When the learning rate has fallen too sharply; half a cosine to zero does after its last exchange."""


class SharedMomentum:
    """Sets the momentum of what was exchanged, on every rank, to the speed that the exchange shows.

    Where the average ``X`` of what the ranks sent was exchanged, after steps of the learning rates ``lr``, ::

        m = X / T  +  keep * (m - (w - x) / t)

    with ``T`` the sum of ``lr`` over the steps since the entry was last exchanged, ``w - x`` the rank's own way since
    the last exchange and ``t`` the sum of ``lr`` over its steps there. Adam's and AdamW's speeds are made momenta by ::

        (speed - decay * w) * (sqrt(v / (1 - beta2^s)) + eps) * (1 - beta1^s)

    with ``v`` and the number of steps ``s`` the rank's own, and ``decay`` that of AdamW. So local steps go on in the
    direction that all ranks have found, not in this rank's: the client-level momentum of FedCM (Xu, Wang, Wang, Yao,
    arXiv 2106.10874), for each entry with its own ``T``.

    ``X / T`` alone, as there and with ``momentum="mean"``, is the speed of the interval's middle, and late by half of
    it. What this rank's momentum has changed by since then makes up for that, but brings the noise of its own batches,
    which adds up over the steps: of two steps all of it is kept, of H steps ``keep = 2 / H``. Ranks that moved alike
    keep their momentum where that is 1. What was not exchanged keeps this rank's momentum; of values that travel in few
    bits, those that became zero were not.

    What rounding has dropped of a value is exchanged later, and after a sharp fall of the learning rate it is more than
    all that the slow steps of ``T`` have moved. Until that is over ranks keep their own momentum: while the sum of an
    interval's learning rates is less than ``SHARPLY`` times the largest before, which fades by ``FADING`` an exchange.

    Args:
        inner: the wrapped optimizer.
        params: its parameters, in the Plan's order.
        shared: the shared weights, in the same order.
        late: keep nothing of the rank's own changes: ``momentum="mean"``.

    Attributes:
        elapsed: the sums ``T``, of one entry each, up to the last exchange.
        interval: the same of the steps since then, one number for each parameter.
        time: the sums ``t``.
        pace: the largest interval at an exchange so far, fading.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, params: Sequence[Tensor], shared: Sequence[Tensor], *, late: bool
    ) -> None:
        self._kept = 0 if late else KEPT
        self._inner, self._params, self._shared = inner, list(params), list(shared)
        self.elapsed = [torch.zeros_like(weight) for weight in shared]
        self.interval = torch.zeros(len(self._shared), dtype=torch.float64, device="cpu")
        self.time = torch.zeros_like(self.interval)
        self.pace = torch.zeros_like(self.interval)

    @staticmethod
    def serves(inner: torch.optim.Optimizer) -> bool:
        """Whether ``inner`` has a momentum that this knows how to set; subclasses may mean something else by theirs."""
        if type(inner) is SGD:
            return any(group["momentum"] for group in inner.param_groups)
        return type(inner) in (Adam, AdamW)

    def stepped(self, moved: Sequence[bool]) -> None:
        """A step was made, or left out on this rank alone: then its speed was zero, but time has gone by for all.

        Args:
            moved: of each parameter, whether this rank's step was made, and on a gradient of it.
        """
        rate_of = {}
        for group in self._inner.param_groups:
            rate = float(group["lr"])
            rate_of.update({id(param): rate for param in group["params"]})
        rates = [rate_of.get(id(param), 0.0) for param in self._params]  # one that was taken out of its group rests
        self.interval += torch.tensor(rates, dtype=torch.float64, device="cpu")
        own = [rate if has_moved else 0.0 for rate, has_moved in zip(rates, moved, strict=True)]
        self.time += torch.tensor(own, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def apply(self, averages: Sequence[Tensor], whole: Sequence[bool], steps: int) -> None:
        """Set what was exchanged; before the shared weights make their outer step, and parameters become these.

        Args:
            averages: of what the ranks sent, one tensor per parameter, zero where nothing was.
            whole: of each parameter, whether zeros were exchanged like any other value.
            steps: the interval had.
        """
        keep = min(1.0, self._kept / max(1, steps))
        groups = {id(param): group for group in self._inner.param_groups for param in group["params"]}
        fused, others, copied = _Share(), _Share(), 0  # others: what the op does not take
        torch.maximum(self.pace.mul_(FADING), self.interval, out=self.pace)
        intervals, times, fell = (x.tolist() for x in (self.interval, self.time, self.interval < SHARPLY * self.pace))
        for i, (param, average, elapsed) in enumerate(zip(self._params, averages, self.elapsed, strict=True)):
            held, interval = self._held(param), intervals[i]
            if held is None or id(param) not in groups or fell[i]:
                time = elapsed.add_(interval)
                time.masked_fill_(torch.ones_like(time, dtype=torch.bool) if whole[i] else average != 0, 0.0)
                continue
            share = fused if self._fits(held, param, groups[id(param)], average, interval) else others
            tensors = (average, elapsed, held, *way(self._shared[i], param))
            share.add(tensors, intervals=interval, times=times[i], keeps=keep, whole=whole[i])
            if not isinstance(self._inner, SGD):
                self._add_adams(share.adams, param, groups[id(param)])
            copied += param.numel() if tensors[-1].data_ptr() != param.data_ptr() else 0
            if copied > ROOM:
                _call(fused, others)
                fused, others, copied = _Share(), _Share(), 0
        _call(fused, others)
        self.forget_interval()

    def state(self, param: int) -> dict[str, Tensor]:
        """What a checkpoint needs of a parameter."""
        numbers = {"interval": self.interval, "time": self.time, "pace": self.pace}
        return {"elapsed": self.elapsed[param]} | {name: number[param] for name, number in numbers.items()}

    def exchanged_all(self) -> None:
        """Nothing is left over of any step, as after a flush."""
        for elapsed in self.elapsed:
            elapsed.zero_()

    def forget_interval(self) -> None:
        """Begin to count anew: the interval is accounted for, or what was moved in it is thrown away."""
        self.interval.zero_()
        self.time.zero_()

    def _held(self, param: Tensor) -> Tensor | None:
        """The optimizer's momentum of a parameter; None before its first gradient, and of sparse gradients."""
        state = self._inner.state.get(param, {})
        held = state.get("momentum_buffer" if isinstance(self._inner, SGD) else "exp_avg")
        return None if held is None or held.is_sparse else held

    def _square(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Adam's second moment, as its step takes it."""
        square: Tensor = self._inner.state[param]["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        return square

    def _fits(self, held: Tensor, param: Tensor, group: Mapping[str, Any], average: Tensor, interval: float) -> bool:
        """Whether the op takes it. A refusal would come on this rank alone, and in the middle of an exchange."""
        moments = [held] if isinstance(self._inner, SGD) else [held, self._square(param, group)]
        lies = all(moment.dtype in FLOATS and moment.is_contiguous() for moment in moments)
        return lies and average.dtype == torch.float32 and abs(interval) <= FLOAT32_MAX  # nor is it NaN

    def _add_adams(self, adams: Adams, param: Tensor, group: Mapping[str, Any]) -> None:
        """What the momentum of ``param`` depends on, as Adam has it at its step."""
        state = self._inner.state[param]
        steps, (beta1, beta2) = float(state["step"]), group["betas"]
        decoupled = group.get("decoupled_weight_decay", isinstance(self._inner, AdamW))
        adams.decays.append(float(group["weight_decay"]) if decoupled else 0.0)
        adams.squares.append(self._square(param, group))
        adams.roots.append(math.sqrt(1 - float(beta2) ** steps))
        adams.epsilons.append(float(group["eps"]))
        adams.factors.append(1 - float(beta1) ** steps)


class _Share:
    """The arguments of a call of ``share_momentum``."""

    def __init__(self) -> None:
        self.tensors: tuple[list[Tensor], ...] = ([], [], [], [], [])
        self.numbers: dict[str, list[Any]] = {}
        self.adams = Adams()

    def add(self, tensors: Sequence[Tensor], **numbers: Any) -> None:
        """One tensor more: its average, time elapsed, momentum, where the rank set out and has come to; its numbers."""
        for these, tensor in zip(self.tensors, tensors, strict=True):
            these.append(tensor)
        for name, number in numbers.items():
            self.numbers.setdefault(name, []).append(number)

    def by(self, op: Callable[..., None], **adams: Any) -> None:
        """Make the call, if there is anything."""
        if self.numbers:
            op(*self.tensors, **self.numbers, **adams)


def _call(fused: _Share, others: _Share) -> None:
    """Share all of both."""
    fused.by(ops.share_momentum, adams=fused.adams)
    others.by(share_momentum_reference, **vars(others.adams))
