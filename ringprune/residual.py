"""Stage 1: what a rank has not sent yet, and the momentum that goes into it.

Error feedback keeps what selection leaves out: ``residual += gradient``. With momentum correction (Deep Gradient
Compression, arXiv 1712.01887, eq. 7) it is the velocity that is accumulated: ``velocity = m * velocity + gradient``,
``residual += velocity``, with Nesterov ``residual += gradient + m * velocity``. A low-pass filter (ScaleCom, arXiv
2104.11125) lets only a share of what is new into what is kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringprune import ops, pages
from ringprune.compiled import compiled
from ringprune.threads import in_parts
from ringprune.validation import real_number

__all__ = ["Clipping", "Correction", "Residual", "Selecting"]

Array: TypeAlias = Any  # numba finds types out by itself


@dataclass(frozen=True)
class Clipping:
    """Local gradient clipping before accumulation (DGC, eq. 8): the bound is divided by sqrt(ranks).

    Args:
        norm: bound of the norm over all of a rank's gradients; needs all of them, so exchanges begin after backward.
        norm_per_tensor: bound of the norm of each tensor's gradient; keeps the overlap with backward.
    """

    norm: float | None = None
    norm_per_tensor: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("clip_norm", self.norm), ("clip_norm_per_tensor", self.norm_per_tensor)):
            if bound is not None:
                real_number(name, bound, above=0)

    def factors(self, grads: Sequence[Tensor], scale: float, ranks: int) -> list[float]:
        """What each of ``grads`` is multiplied by: ``scale`` (1 / loss scale) and the clipping.

        ``grads`` are all of the rank's gradients where ``norm`` is used, otherwise any of them.
        """
        factors = [scale] * len(grads)
        if self.norm is None and self.norm_per_tensor is None:
            return factors
        squares = ops.square_sum(grads).tolist()
        if self.norm_per_tensor is not None:
            bound = self.norm_per_tensor / math.sqrt(ranks)
            factors = [f * _shrink(bound, f * math.sqrt(s)) for f, s in zip(factors, squares, strict=True)]
        if self.norm is not None:
            norm = math.sqrt(sum(f * f * s for f, s in zip(factors, squares, strict=True)))
            shrink = _shrink(self.norm / math.sqrt(ranks), norm)
            factors = [f * shrink for f in factors]
        return factors


def _shrink(bound: float, norm: float) -> float:
    """The factor that brings ``norm`` down to ``bound``; 1 where it is within, and where it is not finite."""
    return bound / norm if bound < norm < math.inf else 1.0


@dataclass(frozen=True)
class Correction:
    """How the gradients of one step enter the residual; one entry per tensor of a bucket.

    Attributes:
        factors: what the gradient is multiplied by first: 1 / loss scale, clipping.
        momentum: momentum of the tensor's param group, read only where there is a velocity.
        nesterov: whether the group uses Nesterov momentum.
        in_place: the gradients are handed over, and may be overwritten.
    """

    factors: list[float]
    momentum: list[float]
    nesterov: list[bool]
    in_place: bool = False


@dataclass(frozen=True)
class Selecting:
    """What a root selects by; one entry per tensor of a bucket.

    Attributes:
        score: name of the score.
        parameters: the score's parameter.
        counts: entries to propose.
    """

    score: str
    parameters: list[float]
    counts: list[int]


@dataclass
class _State:
    """Residual and velocity of a bucket; ``sent`` is what leaves them when they are read next."""

    residual: Tensor
    velocity: Tensor | None
    sent: ops.Sent | None = None


class Residual:
    """Residual and velocity of one packed bucket, flat, float32.

    A step is written beside the state it starts from and takes effect at :meth:`commit`; until then :meth:`rollback`
    gives back the old state to the bit, whatever was accumulated and taken. That costs a second copy of the state;
    ``spare=False`` saves it for callers who know before :meth:`accumulate` that the step will be made, but for the
    residual's where the low-pass filter needs it.

    Args:
        offsets: where each of the bucket's tensors starts; T + 1 numbers.
        velocity: keep a velocity (momentum correction) besides the residual.
        spare: keep the second copy.
        device: where the bucket's tensors live.
        low_pass: share of a step's change that the residual takes on: with what is left over after sending ``p``, it
            becomes ``(1 - low_pass) * residual + low_pass * p``.

    What was sent leaves the state when that is read next, by a pass or through one of the properties here. So a tensor
    that was got before a step is not the state after it, also where the step is made in place.

    Attributes:
        expected: float32, shape ``(numel,)``: what every entry moves by at each step whether it is sent or not; a step
            begins from the residual less this. None is nothing.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        *,
        velocity: bool,
        spare: bool,
        device: torch.device,
        low_pass: float = 1.0,
    ) -> None:
        numel = offsets[-1]
        self.hints = ops.Hints.none(len(offsets) - 1, device)
        self.expected: Tensor | None = None
        self._offsets, self._spare, self._low_pass = offsets, spare, low_pass
        now = _State(pages.zeros(numel, device), pages.zeros(numel, device) if velocity else None)
        if spare:
            self._next = _State(pages.empty(numel, device), pages.empty(numel, device) if velocity else None)
        elif low_pass < 1:
            self._next = _State(pages.empty(numel, device), now.velocity)
        else:
            self._next = now
        self._now = now

    @property
    def residual(self) -> Tensor:
        """Float32, shape ``(numel,)``: what has not been sent."""
        return self._settled(self._now).residual

    @property
    def velocity(self) -> Tensor | None:
        """Float32, shape ``(numel,)``; None without momentum correction."""
        return self._settled(self._now).velocity

    @property
    def next_residual(self) -> Tensor:
        """The residual of the step that is being made."""
        return self._settled(self._next).residual

    @property
    def next_velocity(self) -> Tensor | None:
        """The velocity of the step that is being made."""
        return self._settled(self._next).velocity

    def _settled(self, state: _State) -> _State:
        """``state``, which what was sent has left."""
        sent, state.sent = state.sent, None
        if sent is not None:
            ops.take(state.residual, state.velocity if sent.masks else None, sent.indices, self._offsets)
            if sent.rest is not None:
                ops.give_back(state.residual, sent.indices, sent.rest)
            sent.was_read()
        return state

    def _begin(self) -> tuple[Tensor, ops.Sent | None]:
        """The residual that a step begins from, and what is still to leave it."""
        if self.expected is None:
            return self._now.residual, self._now.sent
        if self._now.velocity is not None:
            self._settled(self._now)  # what leaves here would be in the velocity still
        # The difference, to the bit as torch has it; this writes past the caches, and what was sent leaves with it.
        ops.accumulate(
            [self.expected],
            self._now.residual,
            None,
            residual_out=self._next.residual,
            velocity_out=None,
            factors=[-1.0],
            momentum=[0.0],
            nesterov=[False],
            sent=self._now.sent,
        )
        return self._next.residual, None

    def accumulate(self, grads: Sequence[Tensor], correction: Correction) -> Tensor:
        """[1] Add the corrected gradients to the residual; ``grads`` are contiguous, in the bucket's order.

        Returns:
            How many entries of each gradient are NaN or infinite, int64.
        """
        begin, sent = self._begin()
        result = ops.accumulate(
            grads,
            begin,
            self._now.velocity,
            residual_out=self._next.residual,
            velocity_out=self._next.velocity,
            factors=correction.factors,
            momentum=correction.momentum,
            nesterov=correction.nesterov,
            sent=sent,
        )
        self._accumulated(correction)
        return result

    def accumulate_select(
        self, grads: Sequence[Tensor], correction: Correction, weights: Sequence[Tensor], selecting: Selecting
    ) -> tuple[Tensor, Tensor]:
        """[1] to [3] The same, then score and select, all in one pass over memory.

        Returns:
            The positions of the largest scores, int32, as :func:`ringprune.ops.select` gives them; and the counts of
            :meth:`accumulate`.
        """
        begin, sent = self._begin()
        result = ops.accumulate_select(
            grads,
            begin,
            self._now.velocity,
            weights,
            residual_out=self._next.residual,
            velocity_out=self._next.velocity,
            factors=correction.factors,
            momentum=correction.momentum,
            nesterov=correction.nesterov,
            score=selecting.score,
            parameters=selecting.parameters,
            counts=selecting.counts,
            hints=self.hints,
            sent=sent,
        )
        self._accumulated(correction)
        return result

    def _accumulated(self, correction: Correction) -> None:
        """What was sent is not in the next state; without momentum that keeps no velocity, so that it begins anew."""
        if self._now.sent is not None:
            self._now.sent.was_read()
        self._next.sent = None
        velocity = self._next.velocity
        for i, momentum in enumerate(correction.momentum):
            if velocity is not None and momentum == 0.0:
                velocity[self._offsets[i] : self._offsets[i + 1]].zero_()

    @property
    def waits(self) -> bool:
        """Whether the next to read the step being made is an accumulating pass, as far as the residual knows."""
        one_pass = self.expected is None or self._next.velocity is None
        return self._low_pass == 1 and one_pass and self._next.sent is None

    def leave(self, sent: ops.Sent | None) -> None:
        """[5] What was taken of the step being made leaves it when it is read next; None has left already."""
        self._settled(self._next).sent = sent

    def take_all(self) -> Tensor:
        """[5] All of the residual, itself; the velocity stays, as nothing was left out.

        Its memory may be used for what rounding drops, and :meth:`give_back` is told.
        """
        return self.next_residual

    def give_back(self, indices: Tensor | None, rest: Tensor | None) -> None:
        """Keep what rounding dropped of values that were taken.

        Args:
            indices: int32, ascending, where they were taken; None after :meth:`take_all`.
            rest: float32, one per value, in memory of its own or, of all, of the residual; it is kept until the state
                has been read again. None is nothing.
        """
        if indices is None:
            left = self.next_residual
            if rest is None:
                left.zero_()
            elif rest.data_ptr() != left.data_ptr():
                left.copy_(rest)
        elif rest is None:
            return
        elif self._next.sent is not None and self._next.sent.indices is indices:
            self._next.sent = replace(self._next.sent, rest=rest)
        else:
            ops.give_back(self.next_residual, indices, rest)

    def select(self, weights: Sequence[Tensor], selecting: Selecting, offsets: Sequence[int]) -> Tensor:
        """[2] and [3] Score and select what is kept now, with nothing accumulated; positions as above."""
        scores = ops.importance(self.residual, weights, score=selecting.score, parameters=selecting.parameters)
        return ops.select(scores, offsets, selecting.counts)

    def commit(self) -> None:
        """The step was made: what accumulate and pack wrote is the state now, after the low-pass filter."""
        if self._low_pass < 1:
            _let_pass(self.residual, self.next_residual, self._low_pass)
        self._now, self._next = self._next, self._now
        if self._next is not self._now:
            self._next.sent = None  # nobody goes back to that state

    def rollback(self) -> None:
        """The step is not made: the state is what it was before :meth:`accumulate`."""
        if not self._spare:
            raise AssertionError("a residual without a spare copy cannot be rolled back")
        self._next.sent = None


def _let_pass(old: Tensor, new: Tensor, share: float) -> None:
    """``new`` becomes ``old + share * (new - old)``: an entry that has not changed stays as it is, to the bit."""
    if old.device.type != "cpu":
        new.sub_(old).mul_(share).add_(old)
        return
    before, after = old.numpy(), new.numpy()
    weight = after.dtype.type(share)
    in_parts(after.size, 1024, lambda begin, end: _filter(before[begin:end], after[begin:end], weight))


@compiled
def _filter(old: Array, new: Array, share: Array) -> None:
    """One pass over memory in place of torch's three, each operation rounded as there."""
    for i in range(new.size):
        new[i] = (new[i] - old[i]) * share + old[i]
