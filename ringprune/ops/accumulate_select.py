"""Accumulate, score and select in one pass over memory: stages 1 to 3 of the exchange, on a bucket's roots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError
from ringprune.ops.accumulate import accumulate_reference, check_accumulation
from ringprune.ops.checks import (
    FLOATS,
    check_flat,
    check_length,
    check_numbers,
    check_positions,
    check_tensors,
    offsets_of,
)
from ringprune.ops.importance import check_score, importance_reference
from ringprune.ops.library import call, define
from ringprune.ops.select import check_counts, select_reference
from ringprune.ops.sent import SENT, Sent

__all__ = ["TALLY", "Hints", "accumulate_select"]

SCHEMA = (
    "accumulate_select(Tensor[] grads, Tensor residual, Tensor? velocity, Tensor[] weights, *, "
    "Tensor(a!) residual_out, Tensor(b!)? velocity_out, float[] factors, float[] momentum, bool[] nesterov, "
    f"str score, float[] parameters, int[] counts, Tensor(c!) hints, Tensor(d!) tally, {SENT}) -> (Tensor, Tensor)"
)

TALLY: tuple[str, ...] = ("tensors", "cold", "missed", "overflowed")


@dataclass(frozen=True)
class Hints:
    """What selection remembers of a bucket from one step to the next; it changes how fast it is, never the result.

    While the kernel passes over a tensor it collects the entries whose score is not below the tensor's hint, and
    selects among those. The hint is the score that had rank ``margin * count`` the last time.

    Attributes:
        keys: int32 [T, 2], per tensor the hint (the score's bits; 0 is none) and the margin (1024ths; 0 is the first).
        tally: int64 [4], how often a tensor was selected from; of those, how often there was no hint (``cold``), the
            hint left fewer than wanted (``missed``) or more than there is room for (``overflowed``). Each of the
            three costs that tensor at least one more read.
    """

    keys: Tensor
    tally: Tensor

    @classmethod
    def none(cls, tensors: int, device: torch.device) -> "Hints":
        """Nothing is known of any of ``tensors`` tensors."""
        keys = torch.zeros(tensors, 2, dtype=torch.int32, device=device)
        return cls(keys, torch.zeros(len(TALLY), dtype=torch.int64, device=device))

    def forget(self) -> None:
        """Scores lie elsewhere now: the next selection samples them first, as the first one does."""
        self.keys[:, 0] = 0

    def counts(self) -> dict[str, int]:
        """The tally by name; waits for the device."""
        return dict(zip(TALLY, self.tally.tolist(), strict=True))


def accumulate_select(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    weights: Sequence[Tensor],
    *,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    factors: Sequence[float],
    momentum: Sequence[float],
    nesterov: Sequence[bool],
    score: str,
    parameters: Sequence[float],
    counts: Sequence[int],
    hints: Hints,
    sent: Sent | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as :func:`accumulate`, :func:`importance` of the new residual and :func:`select`, to the bit.

    Args:
        grads: T contiguous tensors of any shape, float32, float16 or bfloat16; N entries together, N below 2**31.
        residual: float32 [N], the tensors' residuals one after another.
        velocity: float32 [N] likewise, or None for plain error feedback.
        weights: T contiguous tensors with as many entries each as ``grads``, float32, float16 or bfloat16.
        residual_out: float32 [N], written; ``residual`` itself or a tensor apart from all others.
        velocity_out: float32 [N], written; ``velocity`` itself or a tensor apart; None where ``velocity`` is.
        factors: T finite numbers that the gradients are multiplied with.
        momentum: T finite numbers; not looked at without velocity.
        nesterov: T truth values; not looked at without velocity.
        score: name of the score, see :func:`importance`.
        parameters: T finite numbers >= 0, the score's parameter.
        counts: T numbers of entries to select, each from 0 to the entries of its tensor.
        hints: what is remembered of these tensors; written.
        sent: what was sent of the residual since it was written, as in :func:`accumulate`.

    Returns:
        Positions as :func:`select` gives them, int32 [sum(counts)], and how many entries of each gradient are NaN or
        infinite, int64 [T].

    Raises:
        ConfigurationError: a shape, device, length or number does not fit, or tensors share memory.
        ArgumentTypeError: a dtype does not fit.
    """
    positions, nonfinite = call(
        _accumulate_select,
        grads,
        residual,
        velocity,
        weights,
        residual_out=residual_out,
        velocity_out=velocity_out,
        factors=factors,
        momentum=momentum,
        nesterov=nesterov,
        score=score,
        parameters=parameters,
        counts=counts,
        hints=hints.keys,
        tally=hints.tally,
        **Sent.arguments(sent),
    )
    return positions, nonfinite


def check_accumulate_select(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    weights: Sequence[Tensor],
    *,
    score: str,
    parameters: Sequence[float],
    counts: Sequence[int],
    hints: Tensor,
    tally: Tensor,
    **accumulation: Any,
) -> None:
    """Refuse arguments of :func:`accumulate_select` that do not fit."""
    op = "accumulate_select"
    check_accumulation(op, grads, residual, velocity, **accumulation)
    device = residual.device
    check_positions(op, residual.numel())
    check_tensors(op, "weights", weights, FLOATS, device=device, numel=residual.numel())
    for i, (weight, grad) in enumerate(zip(weights, grads, strict=False)):
        if weight.numel() != grad.numel():
            raise ConfigurationError(f"{op}: weights[{i}] has {weight.numel()} entries, grads[{i}] {grad.numel()}")
    check_length(op, "weights", weights, len(grads))
    check_score(op, score)
    check_numbers(op, "parameters", parameters, len(grads), low=0.0)
    check_counts(op, counts, [grad.numel() for grad in grads])
    check_tensors(op, "hints.keys", [hints], (torch.int32,), device=device)  # that it is contiguous, before the view
    check_flat(op, "hints.keys", hints.view(-1), torch.int32, device=device, numel=2 * len(grads))
    check_flat(op, "hints.tally", tally, torch.int64, device=device, numel=len(TALLY))


def accumulate_select_reference(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    weights: Sequence[Tensor],
    *,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    factors: Sequence[float],
    momentum: Sequence[float],
    nesterov: Sequence[bool],
    score: str,
    parameters: Sequence[float],
    counts: Sequence[int],
    hints: Tensor,
    tally: Tensor,
    **sent: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`accumulate_select` in torch; it reads everything and needs no hints."""
    nonfinite = accumulate_reference(
        grads,
        residual,
        velocity,
        residual_out=residual_out,
        velocity_out=velocity_out,
        factors=factors,
        momentum=momentum,
        nesterov=nesterov,
        **sent,
    )
    scores = importance_reference(residual_out, weights, score=score, parameters=parameters)
    tally[0] += sum(count > 0 for count in counts)
    return select_reference(scores, offsets_of(grads), counts), nonfinite


def _accumulate_select_fake(
    grads: Sequence[Tensor], residual: Tensor, *args: object, counts: Sequence[int], **kwargs: object
) -> tuple[Tensor, Tensor]:
    positions = torch.empty(sum(counts), dtype=torch.int32, device=residual.device)
    return positions, torch.empty(len(grads), dtype=torch.int64, device=residual.device)


_accumulate_select = define(SCHEMA, check_accumulate_select, accumulate_select_reference, _accumulate_select_fake)
