"""Add corrected gradients to the residual: stage 1 of the exchange."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError
from ringprune.ops.checks import (
    FLOATS,
    check_flat,
    check_indices,
    check_numbers,
    check_overlap,
    check_positions,
    check_tensors,
    check_truths,
    offsets_of,
)
from ringprune.ops.count_nonfinite import count_nonfinite_reference
from ringprune.ops.give_back import give_back_reference
from ringprune.ops.library import call, define
from ringprune.ops.sent import SENT, Sent
from ringprune.ops.take import take_reference

__all__ = ["accumulate", "accumulate_reference", "check_accumulation"]

SCHEMA = (
    "accumulate(Tensor[] grads, Tensor residual, Tensor? velocity, *, Tensor(a!) residual_out, "
    f"Tensor(b!)? velocity_out, float[] factors, float[] momentum, bool[] nesterov, {SENT}) -> Tensor"
)


def accumulate(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    *,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    factors: Sequence[float],
    momentum: Sequence[float],
    nesterov: Sequence[bool],
    sent: Sent | None = None,
) -> Tensor:
    """Add each tensor's gradient, corrected by momentum, to its part of the flat residual.

    Entry by entry of tensor i, each operation rounded to float32, no fused multiply-add::

        g            = float32(grad) * float32(factors[i])
        without velocity:
            residual_out = residual + g
        with velocity:
            v            = float32(momentum[i]) * velocity + g
            velocity_out = v
            residual_out = residual + (g + float32(momentum[i]) * v  if nesterov[i] else  v)

    The results may go into the tensors they come from, or into others; nothing else may share memory.

    Args:
        grads: T contiguous tensors of any shape, float32, float16 or bfloat16; N entries together.
        residual: float32 [N], the tensors' residuals one after another.
        velocity: float32 [N] likewise, or None for plain error feedback.
        residual_out: float32 [N], written; ``residual`` itself or a tensor apart from all others.
        velocity_out: float32 [N], written; ``velocity`` itself or a tensor apart; None where ``velocity`` is.
        factors: T finite numbers that the gradients are multiplied with (clipping, loss scale).
        momentum: T finite numbers; not looked at without velocity.
        nesterov: T truth values; not looked at without velocity.
        sent: what was sent of the residual since it was written; None is nothing. Its indices are checked before
            anything is written. On CUDA a check would wait for the device: there positions outside of [0, N) are
            passed over, and where they do not ascend any of them may stay.

    Returns:
        How many entries of each gradient are NaN or infinite, int64 [T].

    Raises:
        ConfigurationError: a shape, device, length or number does not fit, or tensors share memory.
        ArgumentTypeError: a dtype does not fit.
    """
    nonfinite: Tensor = call(
        _accumulate,
        grads,
        residual,
        velocity,
        residual_out=residual_out,
        velocity_out=velocity_out,
        factors=factors,
        momentum=momentum,
        nesterov=nesterov,
        **Sent.arguments(sent),
    )
    return nonfinite


def check_accumulation(
    op: str,
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    *,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    factors: Sequence[float],
    momentum: Sequence[float],
    nesterov: Sequence[bool],
    sent: Tensor | None = None,
    rest: Tensor | None = None,
    masks: bool = False,
) -> None:
    """Refuse arguments of :func:`accumulate` that do not fit."""
    check_flat(op, "residual", residual, torch.float32)
    device, numel = residual.device, residual.numel()
    check_tensors(op, "grads", grads, FLOATS, device=device, numel=numel)
    check_flat(op, "residual_out", residual_out, torch.float32, device=device, numel=numel)
    if (velocity is None) != (velocity_out is None):
        raise ConfigurationError(f"{op}: velocity and velocity_out must both be tensors or both be None")
    if velocity is not None and velocity_out is not None:
        check_flat(op, "velocity", velocity, torch.float32, device=device, numel=numel)
        check_flat(op, "velocity_out", velocity_out, torch.float32, device=device, numel=numel)
    check_numbers(op, "factors", factors, len(grads))
    check_numbers(op, "momentum", momentum, len(grads))
    check_truths(op, "nesterov", nesterov, len(grads))
    if sent is not None:
        check_flat(op, "sent", sent, torch.int32, device=device)
        check_positions(op, numel)
    if rest is not None:
        if sent is None:
            raise ConfigurationError(f"{op}: rest is what is left where something was sent; sent is None")
        check_flat(op, "rest", rest, torch.float32, device=device, numel=sent.numel())


def accumulate_reference(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    *,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    factors: Sequence[float],
    momentum: Sequence[float],
    nesterov: Sequence[bool],
    sent: Tensor | None = None,
    rest: Tensor | None = None,
    masks: bool = False,
) -> Tensor:
    """:func:`accumulate` in torch."""
    _refuse_overlap(grads, residual, velocity, residual_out, velocity_out, sent, rest)
    # 0-dim float32 tensors: the rounding of the numbers is then this line's, not a kernel's.
    factors32 = torch.tensor(factors, dtype=torch.float32, device="cpu")
    momentum32 = torch.tensor(momentum, dtype=torch.float32, device="cpu")
    offsets = offsets_of(grads)
    if sent is not None:
        residual, velocity = _without(sent, rest, residual, velocity, masks, offsets)
    for i, grad in enumerate(grads):
        part = slice(offsets[i], offsets[i + 1])
        change = grad.reshape(-1).float() * factors32[i]
        if velocity is not None and velocity_out is not None:
            v = velocity[part] * momentum32[i] + change
            velocity_out[part] = v
            change = v * momentum32[i] + change if nesterov[i] else v
        residual_out[part] = residual[part] + change
    return count_nonfinite_reference(grads) if grads else torch.empty(0, dtype=torch.int64, device=residual.device)


def _without(
    sent: Tensor, rest: Tensor | None, residual: Tensor, velocity: Tensor | None, masks: bool, offsets: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Copies of residual and velocity that what was sent has left."""
    check_indices("accumulate", sent, residual.numel(), "sent")
    residual, velocity = residual.clone(), None if velocity is None else velocity.clone()
    take_reference(residual, velocity if masks else None, sent, offsets)
    if rest is not None:
        give_back_reference(residual, sent, rest)
    return residual, velocity


def _refuse_overlap(
    grads: Sequence[Tensor],
    residual: Tensor,
    velocity: Tensor | None,
    residual_out: Tensor,
    velocity_out: Tensor | None,
    sent: Tensor | None,
    rest: Tensor | None,
) -> None:
    """What is written shares no memory with anything but the tensor it may replace."""
    tensors = {"residual": residual, "velocity": velocity, "residual_out": residual_out, "velocity_out": velocity_out}
    tensors |= {"sent": sent, "rest": rest}
    tensors |= {f"grads[{i}]": grad for i, grad in enumerate(grads)}
    for name, written, source in (
        ("residual_out", residual_out, residual),
        ("velocity_out", velocity_out, velocity),
    ):
        for other_name, other in tensors.items():
            if written is None or other is None or other_name == name:
                continue
            in_place = other is source and other.data_ptr() == written.data_ptr()
            if not in_place:
                check_overlap("accumulate", name, written, other_name, other)


def _accumulate_fake(grads: Sequence[Tensor], residual: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(len(grads), dtype=torch.int64, device=residual.device)


_accumulate = define(SCHEMA, partial(check_accumulation, "accumulate"), accumulate_reference, _accumulate_fake)
