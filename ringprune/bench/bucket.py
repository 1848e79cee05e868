"""What is measured: cases, and a bucket whose state evolves as in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from ringprune import importance, ops, packing, pages, selection

__all__ = ["MOMENTUM", "WARMUP", "Bucket", "Case"]

MOMENTUM = 0.9
WARMUP = 12
"""Steps of error feedback before anything is timed; the first selects without hints, later ones have settled hints."""


@dataclass(frozen=True)
class Case:
    """One line of the results.

    Attributes:
        name: ``flat`` (one tensor), ``cold`` (the same, hints forgotten before each call) or ``resnet50``.
        shapes: of the bucket's tensors.
        density: share of each tensor's entries that is selected.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    density: float

    @property
    def numels(self) -> list[int]:
        """Entries of each tensor."""
        return [prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Entries of the bucket."""
        return sum(self.numels)

    @property
    def counts(self) -> list[int]:
        """Entries to select of each tensor, by the rule of training."""
        return selection.budgets(self.numels, self.density)

    def __str__(self) -> str:
        return f"{self.name} {self.numel:,} at {100 * self.density:g} %"


class Bucket:
    """One bucket in training: weights, gradients, residual, velocity and hints.

    ``residual``, ``velocity`` and ``fresh`` are the state before the step and the step's gradients; calls that are
    timed work on copies of them (``out_residual``, ``out_velocity``, ``grad``), so that all find the same. What was
    ``sent`` at the step before has left them; the fused pass does that work all the same, where the wrapper's does.

    Args:
        case: what to build.
        device: where.
        seed: of weights and gradients.
    """

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device = case, device
        self.numels, self.counts = case.numels, case.counts
        self.offsets = list(accumulate(self.numels, initial=0))
        self._random = torch.Generator(device).manual_seed(seed)
        self.weight = self._normal()
        self.fresh, self.grad = torch.empty_like(self.weight), torch.empty_like(self.weight)
        numel = self.weight.numel()
        self.residual, self.velocity = pages.zeros(numel, device), pages.zeros(numel, device)  # as the wrapper's
        self.out_residual, self.out_velocity = pages.empty(numel, device), pages.empty(numel, device)
        self.weights, self.grads = self._tensors(self.weight), self._tensors(self.grad)
        self._scales = torch.exp(2 * torch.randn(len(case.shapes), generator=self._random, device=device)).tolist()
        self._hints = ops.Hints.none(len(case.shapes), device)
        self.hints = ops.Hints.none(len(case.shapes), device)
        self.sent: ops.Sent | None = None
        self._taken: ops.Sent | None = None
        self.parameters = importance.Ratio().parameters(importance.root_mean_square(self.weights))

    def draw(self) -> None:
        """New gradients: normal, of another scale in each tensor."""
        self.fresh.normal_(generator=self._random)
        for part, scale in zip(self.parts(self.fresh), self._scales, strict=True):
            part.mul_(scale)

    def restore(self) -> None:
        """Make the copies what they were before the step."""
        self.out_residual.copy_(self.residual)
        self.out_velocity.copy_(self.velocity)
        self.hints.keys.copy_(self._hints.keys)
        self.grad.copy_(self.fresh)
        if self.case.name == "cold":
            self.hints.keys.zero_()

    def step(self) -> None:
        """Make the step: its outcome is the state before the next one."""
        self.restore()
        self.full()
        self.settle()
        self.sent = self._taken
        self.residual, self.out_residual = self.out_residual, self.residual
        self.velocity, self.out_velocity = self.out_velocity, self.velocity
        self._hints.keys.copy_(self.hints.keys)

    def settle(self) -> None:
        """What :meth:`full` has taken leaves the copies, where it would with the next pass over them."""
        if self._taken is not None:
            ops.take(self.out_residual, self.out_velocity, self._taken.indices, self.offsets)

    def parts(self, flat: Tensor) -> Sequence[Tensor]:
        """Each tensor's part of a flat one."""
        return torch.split(flat, self.numels)

    # -- what is timed ------------------------------------------------------------------------------------------------

    def pass1(self) -> Tensor:
        """The same pass over memory without selection: nothing is asked for."""
        return self._accumulate_select([0] * len(self.counts), self.out_residual, self.out_velocity)

    def fused(self) -> Tensor:
        """Accumulate, score and select; returns the positions."""
        return self._accumulate_select(self.counts, self.out_residual, self.out_velocity)

    def beside(self) -> Tensor:
        """The same, written beside the state it starts from, as the wrapper does when it exchanges during backward."""
        return self._accumulate_select(self.counts, self.residual, self.velocity)

    def full(self) -> None:
        """The whole local step: select, take the values, write them into otherwise zero gradients."""
        positions = self.fused()
        values, self._taken = packing.pack(self.out_residual, self.out_velocity, positions, self.offsets, lazily=True)
        ops.put(self.grads, positions, values)

    def rms(self) -> Tensor:
        """What the refresh of the weights' root mean square costs, once in ``importance.RMS_REFRESH`` steps."""
        return ops.square_sum(self.weights)

    def _accumulate_select(self, counts: list[int], residual: Tensor, velocity: Tensor) -> Tensor:
        tensors = len(self.counts)
        positions, _ = ops.accumulate_select(
            self.grads,
            residual,
            velocity,
            self.weights,
            residual_out=self.out_residual,
            velocity_out=self.out_velocity,
            factors=[1.0] * tensors,
            momentum=[MOMENTUM] * tensors,
            nesterov=[False] * tensors,
            score="ratio",
            parameters=self.parameters,
            counts=counts,
            hints=self.hints,
            sent=self.sent,
        )
        return positions

    def _normal(self) -> Tensor:
        return torch.randn(sum(self.numels), generator=self._random, device=self.device)

    def _tensors(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(self.parts(flat), self.case.shapes, strict=True)]
