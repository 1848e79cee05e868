"""Stage 1: what a rank has not sent yet, and the momentum that goes into it.

Error feedback keeps what selection leaves out: ``residual += gradient``. With momentum correction (Deep Gradient
Compression, arXiv 1712.01887, eq. 7) it is the velocity that is accumulated: ``velocity = m * velocity + gradient``,
``residual += velocity``, with Nesterov ``residual += gradient + m * velocity``. A low-pass filter (ScaleCom, arXiv
2104.11125) lets only a share of what is new into what is kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringprune import ops, pages
from ringprune.validation import real_number

__all__ = ["Clipping", "Correction", "Residual", "Selecting"]


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


class Residual:
    """Residual and velocity of one packed bucket, flat, float32.

    A step is written beside the state it starts from and takes effect at :meth:`commit`; until then :meth:`rollback`
    gives back the old state to the bit, whatever was accumulated and taken. That costs a second copy of the state;
    ``spare=False`` saves it for callers who know before :meth:`accumulate` that the step will be made, but for the
    residual's where the low-pass filter needs it.

    Args:
        tensors: tensors of the bucket.
        numel: their entries.
        velocity: keep a velocity (momentum correction) besides the residual.
        spare: keep the second copy.
        device: where the bucket's tensors live.
        low_pass: share of a step's change that the residual takes on: with what is left over after sending ``p``, it
            becomes ``(1 - low_pass) * residual + low_pass * p``.

    Attributes:
        expected: float32, shape ``(numel,)``: what every entry moves by at each step whether it is sent or not; a step
            begins from the residual less this. None is nothing.
    """

    def __init__(
        self,
        tensors: int,
        numel: int,
        *,
        velocity: bool,
        spare: bool,
        device: torch.device,
        low_pass: float = 1.0,
    ) -> None:
        self.hints = ops.Hints.none(tensors, device)
        self.residual = pages.zeros(numel, device)
        self.velocity = pages.zeros(numel, device) if velocity else None
        self.expected: Tensor | None = None
        self._spare, self._low_pass = spare, low_pass
        apart = spare or low_pass < 1
        self.next_residual = pages.empty(numel, device) if apart else self.residual
        self.next_velocity = pages.empty(numel, device) if spare and velocity else self.velocity

    def _begin(self) -> Tensor:
        """The residual that a step begins from."""
        if self.expected is None:
            return self.residual
        return torch.sub(self.residual, self.expected, out=self.next_residual)

    def accumulate(self, grads: Sequence[Tensor], correction: Correction) -> Tensor:
        """[1] Add the corrected gradients to the residual; ``grads`` are contiguous, in the bucket's order.

        Returns:
            How many entries of each gradient are NaN or infinite, int64.
        """
        return ops.accumulate(
            grads,
            self._begin(),
            self.velocity,
            residual_out=self.next_residual,
            velocity_out=self.next_velocity,
            factors=correction.factors,
            momentum=correction.momentum,
            nesterov=correction.nesterov,
        )

    def accumulate_select(
        self, grads: Sequence[Tensor], correction: Correction, weights: Sequence[Tensor], selecting: Selecting
    ) -> tuple[Tensor, Tensor]:
        """[1] to [3] The same, then score and select, all in one pass over memory.

        Returns:
            The positions of the largest scores, int32, as :func:`ringprune.ops.select` gives them; and the counts of
            :meth:`accumulate`.
        """
        return ops.accumulate_select(
            grads,
            self._begin(),
            self.velocity,
            weights,
            residual_out=self.next_residual,
            velocity_out=self.next_velocity,
            factors=correction.factors,
            momentum=correction.momentum,
            nesterov=correction.nesterov,
            score=selecting.score,
            parameters=selecting.parameters,
            counts=selecting.counts,
            hints=self.hints,
        )

    def select(self, weights: Sequence[Tensor], selecting: Selecting, offsets: Sequence[int]) -> Tensor:
        """[2] and [3] Score and select what is kept now, with nothing accumulated; positions as above."""
        scores = ops.importance(self.residual, weights, score=selecting.score, parameters=selecting.parameters)
        return ops.select(scores, offsets, selecting.counts)

    def commit(self) -> None:
        """The step was made: what accumulate and pack wrote is the state now, after the low-pass filter."""
        if self._low_pass < 1:  # an entry that has not changed stays as it is, to the bit
            self.next_residual.sub_(self.residual).mul_(self._low_pass).add_(self.residual)
        self.residual, self.next_residual = self.next_residual, self.residual
        self.velocity, self.next_velocity = self.next_velocity, self.velocity

    def rollback(self) -> None:
        """The step is not made: the state is what it was before :meth:`accumulate`."""
        if not self._spare:
            raise AssertionError("a residual without a spare copy cannot be rolled back")
