"""Set an optimizer's momentum to the speed at which all ranks have moved: after stage 7, in update mode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringprune.ops.checks import FLOATS, check_length, check_numbers, check_tensors, check_truths
from ringprune.ops.library import call, define

__all__ = ["Adams", "share_momentum"]

SCHEMA = (
    "share_momentum(Tensor[] averages, Tensor(a!)[] elapsed, Tensor(b!)[] momenta, *, float[] intervals, bool[] whole, "
    "Tensor[] weights, Tensor[] squares, float[] decays, float[] roots, float[] epsilons, float[] factors) -> ()"
)
KINDS = ("averages", "elapsed", "momenta", "weights", "squares")


@dataclass
class Adams:
    """What Adam's momentum depends on besides, one entry for each of T tensors; nothing at all for SGD.

    Attributes:
        weights: float32, the weights that move.
        squares: Adam's second moment ``v``, dtypes as those of the momenta.
        decays: decoupled weight decay; 0 where it is none.
        roots: ``sqrt(1 - beta2^t)``.
        epsilons: Adam's ``eps``.
        factors: ``1 - beta1^t``.
    """

    weights: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)
    roots: list[float] = field(default_factory=list)
    epsilons: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


def share_momentum(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    whole: Sequence[bool],
    adams: Adams,
) -> None:
    """Where something arrived, make the momentum what would move the weights by as much in as much time.

    With the time ``T = elapsed + interval`` since an entry was last exchanged, and its average ``X``, ::

        m = X / T                                                   SGD
        m = (X / T - decay * w) * (sqrt(v) / root + eps) * factor   Adam

    where ``X`` is not 0, or the tensor is exchanged whole, and ``T`` is above 0; other momenta stay. ``elapsed``
    becomes 0 where something arrived, ``T`` elsewhere. Each operation is rounded to float32 by itself.

    Args:
        averages: T contiguous float32 tensors of any shape: what all ranks have moved by, on average.
        elapsed: T float32 tensors as large; changed.
        momenta: T tensors as large, float32, float16 or bfloat16; changed. What is changed shares no memory with
            anything else.
        intervals: of each tensor, the time since the last exchange: the sum of the steps' learning rates.
        whole: of each tensor, whether zeros have arrived like any other value.
        adams: for SGD an empty one.

    Raises:
        ConfigurationError: a length, size, device or number does not fit; nothing has been written.
        ArgumentTypeError: a dtype does not fit; nothing has been written.
    """
    if isinstance(averages, (list, tuple)) and not averages:  # the dispatcher needs a tensor to find the kernel
        return
    call(_share_momentum, averages, elapsed, momenta, intervals=intervals, whole=whole, **vars(adams))


def check_share_momentum(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    whole: Sequence[bool],
    weights: Sequence[Tensor],
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
    lists = dict(zip(KINDS, (averages, elapsed, momenta, weights, squares), strict=True))
    adams = tensors if squares else 0
    for name, dtypes, length in (
        ("elapsed", (torch.float32,), tensors),
        ("momenta", FLOATS, tensors),
        ("weights", (torch.float32,), adams),
        ("squares", FLOATS, adams),
    ):
        check_tensors(op, name, lists[name], dtypes, device=device)
        check_length(op, name, lists[name], length)
        for i, (tensor, average) in enumerate(zip(lists[name], averages, strict=False)):
            check_tensors(op, f"{name}[{i}]", [tensor], dtypes, numel=average.numel())
    check_numbers(op, "intervals", intervals, tensors)
    check_truths(op, "whole", whole, tensors)
    check_numbers(op, "decays", decays, adams)
    for name, values in (("roots", roots), ("epsilons", epsilons), ("factors", factors)):
        check_numbers(op, name, values, adams, low=0.0)


def share_momentum_reference(
    averages: Sequence[Tensor],
    elapsed: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    intervals: Sequence[float],
    whole: Sequence[bool],
    weights: Sequence[Tensor] = (),
    squares: Sequence[Tensor] = (),
    decays: Sequence[float] = (),
    roots: Sequence[float] = (),
    epsilons: Sequence[float] = (),
    factors: Sequence[float] = (),
) -> None:
    """:func:`share_momentum` in torch; of tensors of any layout and floating-point dtype."""
    for i, (average, time, momentum) in enumerate(zip(averages, elapsed, momenta, strict=True)):
        time.add_(intervals[i])
        said = average / time.view_as(average)
        if squares:
            # In double: torch takes float32's roots from libraries that round them otherwise than IEEE.
            root = squares[i].double().sqrt().to(said.dtype).view_as(average) / roots[i] + epsilons[i]
            said = (said - decays[i] * weights[i].view_as(average)) * root * factors[i]
        arrived = torch.ones_like(average, dtype=torch.bool) if whole[i] else average != 0
        known = arrived & (time.view_as(average) > 0)
        momentum.copy_(torch.where(known, said.to(momentum.dtype), momentum.view_as(average)).view_as(momentum))
        time.masked_fill_(arrived.view_as(time), 0.0)


def _share_momentum_fake(
    averages: Sequence[Tensor], elapsed: Sequence[Tensor], momenta: Sequence[Tensor], **rest: object
) -> None:
    """Nothing is returned, so there is no shape to tell."""


_share_momentum = define(SCHEMA, check_share_momentum, share_momentum_reference, _share_momentum_fake)
