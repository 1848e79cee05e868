"""Shift an optimizer's momentum to the speed at which all ranks have moved: after stage 7, in update mode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS, check_length, check_numbers, check_tensors, check_truths
from ringprune.ops.library import call, define

__all__ = ["Adams", "share_momentum"]

SCHEMA = (
    "share_momentum(Tensor[] averages, Tensor(a!)[] elapsed, Tensor(b!)[] momenta, Tensor[] weights, Tensor[] owns, *, "
    "float[] intervals, float[] times, float[] keeps, bool[] whole, "
    "Tensor[] squares, float[] decays, float[] roots, float[] epsilons, float[] factors) -> ()"
)
KINDS = ("averages", "elapsed", "momenta", "weights", "owns", "squares")


@dataclass
class Adams:
    """What Adam's momentum depends on besides, one entry for each of T tensors; nothing at all for SGD.

    Attributes:
        squares: Adam's second moment ``v``, dtypes as those of the momenta.
        decays: decoupled weight decay; 0 where it is none.
        roots: ``sqrt(1 - beta2^t)``.
        epsilons: Adam's ``eps``.
        factors: ``1 - beta1^t``.
    """

    squares: list[Tensor] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)
    roots: list[float] = field(default_factory=list)
    epsilons: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


def share_momentum(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    weights: Sequence[Tensor],
    owns: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    times: Sequence[float],
    keeps: Sequence[float],
    whole: Sequence[bool],
    adams: Adams,
) -> None:
    """Where something arrived, make the momentum what would move the weights as fast as all ranks have moved.

    With the time ``T = elapsed + interval`` since an entry was last exchanged, its average ``X``, and this rank's own
    way from ``w`` to ``x`` in the time ``t``, ::

        m = keep * m + X / T - keep * (w - x) / t                          SGD
        m = keep * m + ((X / T - decay * w) - keep * ((w - x) / t - decay * w)) * (sqrt(v) / root + eps) * factor

    the latter for Adam, where ``X`` is not 0, or the tensor is exchanged whole, and ``T`` and ``t`` are above 0; other
    momenta stay. ``X / T`` is the speed of an interval's middle; ``keep`` of what this rank's own momentum has changed
    by since is added to it. Ranks that moved alike keep their momentum where that is all.
    ``elapsed`` becomes 0 where something arrived, ``T`` elsewhere. Each operation is rounded to float32 by itself.

    Args:
        averages: P contiguous float32 tensors of any shape: what all ranks have moved by, on average.
        elapsed: P float32 tensors as large; changed.
        momenta: P tensors as large, float32, float16 or bfloat16; changed. What is changed shares no memory with
            anything else.
        weights: P float32 tensors as large: where this rank set out from.
        owns: P float32 tensors as large: where it has come to.
        intervals: of each tensor, the time since the last exchange: the sum of the steps' learning rates.
        times: the same of those steps that this rank made.
        keeps: of each tensor, which part of its own change is kept, 0 to 1.
        whole: of each tensor, whether zeros have arrived like any other value.
        adams: for SGD an empty one.

    Raises:
        ConfigurationError: a length, size, device or number does not fit; nothing has been written.
        ArgumentTypeError: a dtype does not fit; nothing has been written.
    """
    if isinstance(averages, (list, tuple)) and not averages:  # the dispatcher needs a tensor to find the kernel
        return
    tensors = (averages, elapsed, momenta, weights, owns)
    call(_share_momentum, *tensors, intervals=intervals, times=times, keeps=keeps, whole=whole, **vars(adams))


def check_share_momentum(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    weights: Sequence[Tensor],
    owns: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    times: Sequence[float],
    keeps: Sequence[float],
    whole: Sequence[bool],
    squares: Sequence[Tensor],
    decays: Sequence[float],
    roots: Sequence[float],
    epsilons: Sequence[float],
    factors: Sequence[float],
) -> None:
    """Refuse arguments of :func:`share_momentum` that do not fit."""
    op = "share_momentum"
    check_tensors(op, "averages", averages, (torch.float32,))
    tensors, device = len(averages), averages[0].device if averages else None
    lists = dict(zip(KINDS, (averages, elapsed, momenta, weights, owns, squares), strict=True))
    adams = tensors if squares else 0
    for name, dtypes, length in (
        ("elapsed", (torch.float32,), tensors),
        ("momenta", FLOATS, tensors),
        ("weights", (torch.float32,), tensors),
        ("owns", (torch.float32,), tensors),
        ("squares", FLOATS, adams),
    ):
        check_tensors(op, name, lists[name], dtypes, device=device)
        check_length(op, name, lists[name], length)
        for i, (tensor, average) in enumerate(zip(lists[name], averages, strict=False)):
            check_tensors(op, f"{name}[{i}]", [tensor], dtypes, numel=average.numel())
    check_numbers(op, "intervals", intervals, tensors)
    check_numbers(op, "times", times, tensors)
    check_numbers(op, "keeps", keeps, tensors)
    check_truths(op, "whole", whole, tensors)
    check_numbers(op, "decays", decays, adams)
    for name, values in (("roots", roots), ("epsilons", epsilons), ("factors", factors)):
        check_numbers(op, name, values, adams, low=0.0)


def share_momentum_reference(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    weights: Sequence[Tensor],
    owns: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    times: Sequence[float],
    keeps: Sequence[float],
    whole: Sequence[bool],
    squares: Sequence[Tensor] = (),
    decays: Sequence[float] = (),
    roots: Sequence[float] = (),
    epsilons: Sequence[float] = (),
    factors: Sequence[float] = (),
) -> None:
    """:func:`share_momentum` in torch; of tensors of any layout and floating-point dtype."""
    for i, (average, time, momentum, weight, own) in enumerate(
        zip(averages, elapsed, momenta, weights, owns, strict=True)
    ):
        time.add_(intervals[i])
        said, way = average / time.view_as(average), (weight.view_as(average) - own.view_as(average)) / times[i]
        if squares:
            decayed = decays[i] * weight.view_as(average)
            # In double: torch takes float32's roots from libraries that round them otherwise than IEEE.
            root = squares[i].double().sqrt().to(said.dtype).view_as(average) / roots[i] + epsilons[i]
            gap = ((said - decayed) - keeps[i] * (way - decayed)) * root * factors[i]
        else:
            gap = said - keeps[i] * way
        arrived = torch.ones_like(average, dtype=torch.bool) if whole[i] else average != 0
        known = arrived & (time.view_as(average) > 0) & (times[i] > 0)
        held = momentum.view_as(average)
        kept = keeps[i] * held.to(torch.promote_types(held.dtype, gap.dtype))
        momentum.copy_(torch.where(known, (kept + gap).to(held.dtype), held).view_as(momentum))
        time.masked_fill_(arrived.view_as(time), 0.0)


def _share_momentum_fake(averages: Sequence[Tensor], *rest: object, **numbers: object) -> None:
    """Nothing is returned, so there is no shape to tell."""


_share_momentum = define(SCHEMA, check_share_momentum, share_momentum_reference, _share_momentum_fake)
