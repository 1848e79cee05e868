"""Stage 3: how many entries are sent at a step, how many of them this rank proposes, and which are drawn by lot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringprune import counter_rng, ops
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.validation import real_number, whole_number

__all__ = ["Density", "Warmup", "budgets", "divide", "explore", "shares", "unpadded", "within"]


@dataclass(frozen=True)
class Warmup:
    """Start dense and thin out: the density falls geometrically from ``start`` over ``steps`` steps.

    A geometric ramp is that of Deep Gradient Compression (arXiv 1712.01887, section 3.3), taken per step instead of per
    epoch.

    Args:
        steps: length of the ramp in exchanges, which without local steps are optimizer steps; 0 is none.
        start: density of the first step.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
    """

    steps: int
    start: float = 1.0

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, 0)
        real_number("start", self.start, above=0, most=1)


@dataclass(frozen=True)
class Density:
    """The share of a packed tensor's entries sent per exchange, all roots together.

    Args:
        target: the density after warm-up, above 0 and at most 1.
        warmup: the way there.
    """

    target: float
    warmup: Warmup = Warmup(steps=0)

    def __post_init__(self) -> None:
        if isinstance(self.target, int | float) and 1 < self.target <= 100:
            raise ConfigurationError(
                f"density={self.target!r}: it is a share; {self.target:g} % is {self.target / 100:g}"
            )
        real_number("density", self.target, above=0, most=1)
        if not isinstance(self.warmup, Warmup):
            raise ArgumentTypeError(f"warmup={self.warmup!r}: a ringprune.Warmup(steps, start), or None")
        if self.warmup.steps and self.warmup.start < self.target:
            raise ConfigurationError(
                f"Warmup(start={self.warmup.start!r}) is below density={self.target!r}: it thins out"
            )

    def at(self, step: int) -> float:
        """The density of exchange ``step``, counted from 0."""
        if self.steady(step):
            return self.target
        progress = step / self.warmup.steps
        return float(self.warmup.start * (self.target / self.warmup.start) ** progress)

    def steady(self, step: int) -> bool:
        """Whether warm-up is over at ``step``."""
        return step >= self.warmup.steps


def within(indices: Tensor, offsets: Sequence[int], chosen: Sequence[bool]) -> Tensor:
    """Those of ``indices`` that lie in chosen tensors.

    Args:
        indices: int32, shape ``(n,)``, of a bucket.
        offsets: where its tensors begin, and its end.
        chosen: of each tensor, whether it is.
    """
    ends = torch.tensor(offsets[1:], dtype=indices.dtype, device=indices.device)
    return indices[torch.tensor(chosen, device=indices.device)[torch.bucketize(indices, ends, right=True)]]


def unpadded(positions: Tensor) -> Tensor:
    """Selected positions without what fills them up where few scores are above zero: as a rule nothing does."""
    filled = positions.numel() and int(positions.min()) == ops.PAD
    return positions[positions != ops.PAD] if filled else positions


def budgets(numels: Sequence[int], density: float) -> list[int]:
    """Entries to send of each tensor: ``max(1, round(density * numel))``; none of an empty one."""
    return [min(numel, max(1, round(density * numel))) for numel in numels]


def divide(total: int, weights: Sequence[int], numels: Sequence[int]) -> list[int]:
    """Divide a budget over tensors in proportion to weights, in whole numbers alone: the same on every machine.

    Args:
        total: entries to send: at least one for each tensor that has any, at most all.
        weights: one per tensor, not negative. What a full tensor cannot take goes to the others, in proportion again;
            in proportion to the room they have, where they have no weight.
        numels: entries of each tensor.

    Returns:
        One number per tensor, at least 1 and at most its entries (none of an empty one); ``total`` together. Of what is
        above the one each, a tensor that is not full has its share, rounded; most to the largest remainders.
    """
    budget = [min(1, numel) for numel in numels]
    while left := total - sum(budget):
        room = {i: numel - k for i, (numel, k) in enumerate(zip(numels, budget, strict=True)) if numel > k}
        by = {i: weights[i] for i in room} if any(weights[i] for i in room) else room
        whole = sum(by.values())
        full = [i for i, weight in by.items() if left * weight > room[i] * whole]
        for i in full:
            budget[i] += room[i]
        if not full:
            parts = {i: left * weight // whole for i, weight in by.items()}
            over = set(sorted(by, key=lambda i: -(left * by[i] % whole))[: left - sum(parts.values())])
            for i, part in parts.items():
                budget[i] += part + (i in over)
    return budget


def shares(budget: Sequence[int], explore: float, roots: int) -> tuple[list[int], list[int]]:
    """Divide each tensor's budget: entries drawn with the shared seed, and entries each root proposes.

    The roots together propose at least what exploration leaves of the budget: ``ceil(rest / roots)`` each.
    """
    drawn = [round(explore * k) for k in budget]
    proposed = [-(-(k - e) // roots) for k, e in zip(budget, drawn, strict=True)]
    return drawn, proposed


def explore(drawn: Sequence[int], offsets: Sequence[int], *key: int) -> Tensor:
    """Positions drawn with the shared seed: the same on every rank, so that they cost no index bytes.

    Args:
        drawn: how many of each tensor of a bucket.
        offsets: the bucket's offsets.
        key: seed, step and bucket.

    Returns:
        int32 positions in the bucket, ascending, on the CPU.
    """
    picks = [
        counter_rng.stratified(count, end - start, *key, member) + start
        for member, (count, start, end) in enumerate(zip(drawn, offsets, offsets[1:], strict=False))
        if count
    ]
    return torch.from_numpy(np.concatenate([*picks, np.empty(0)]).astype(np.int32))
