"""Stage 2: how important an entry is, relative to its weight.

The score of Importance Weighted Pruning (arXiv 1901.01544) is the ratio of gradient to weight, ``|g / w|``. Taken raw
it chases small weights; RingPrune adds a share of the tensor's root mean square to the denominator (docs/papers.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringprune import ops
from ringprune.ops.importance import SCORES
from ringprune.validation import real_number

__all__ = [
    "KERNELS",
    "RMS_REFRESH",
    "Magnitude",
    "MagnitudePlusGradient",
    "Product",
    "Ratio",
    "Score",
    "root_mean_square",
    "scores",
]

RMS_REFRESH = 50
"""Steps between two readings of the weights' root mean square; a weight's scale drifts over thousands."""

KERNELS = tuple(SCORES)
"""The names that a score can have: one for each formula that is compiled."""

_LARGEST = torch.finfo(torch.float32).max


class Score(Protocol):
    """How important an entry is: the name of a kernel's score, and that score's parameter for each tensor."""

    @property
    def name(self) -> str:
        """One of :func:`ringprune.ops.importance`'s scores."""

    def parameters(self, rms: Tensor) -> list[float]:
        """One number per tensor, from the tensors' root mean squares (float64)."""


@dataclass(frozen=True)
class Ratio:
    """``|residual| / (|weight| + damping * rms(weights of the tensor) + eps)``.

    Args:
        damping: share of the tensor's rms that is added to every weight; 0 is the paper's raw ratio.
        eps: keeps the ratio finite where a weight and the rms are zero.
    """

    damping: float = 1.0
    eps: float = 1e-8
    name = "ratio"

    def __post_init__(self) -> None:
        real_number("damping", self.damping, least=0)
        # The kernels add it in float32: below the smallest number it would be zero, and 0 / 0 the largest score.
        real_number("eps", self.eps, least=torch.finfo(torch.float32).tiny)

    def parameters(self, rms: Tensor) -> list[float]:
        """What is added to the weights of each tensor."""
        # The rms of weights that are not finite is not either; a rank that raised here would leave the others waiting.
        floors = [self.damping * value + self.eps for value in rms.tolist()]
        return [floor if floor < _LARGEST else _LARGEST for floor in floors]


@dataclass(frozen=True)
class Magnitude:
    """``|residual|``, as in Deep Gradient Compression (arXiv 1712.01887)."""

    name = "magnitude"

    def parameters(self, rms: Tensor) -> list[float]:
        """It has none."""
        return [0.0] * len(rms)


@dataclass(frozen=True)
class MagnitudePlusGradient:
    """``|weight| + factor * |residual|``, Slim-DP's significance (arXiv 1709.09393).

    Args:
        factor: weight of the residual.
    """

    factor: float = 1.0
    name = "sum"

    def __post_init__(self) -> None:
        real_number("factor", self.factor, least=0, most=_LARGEST)

    def parameters(self, rms: Tensor) -> list[float]:
        """The factor, for every tensor."""
        return [self.factor] * len(rms)


@dataclass(frozen=True)
class Product:
    """``|weight * residual|``, the first-order relevance of MIPD (doi 10.1109/tpds.2022.3154387)."""

    name = "product"

    def parameters(self, rms: Tensor) -> list[float]:
        """It has none."""
        return [0.0] * len(rms)


def scores(score: Score, residual: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[2] Score every entry, for a look at it; in training the pass that accumulates does it.

    Args:
        score: what an entry is worth.
        residual: float32, shape ``(n,)``.
        weights: contiguous tensors, n entries together.

    Returns:
        float32 scores, shape ``(n,)``, not negative.
    """
    parameters = score.parameters(root_mean_square(weights))
    return ops.importance(residual, weights, score=score.name, parameters=parameters)


def root_mean_square(weights: Sequence[Tensor]) -> Tensor:
    """The root mean square of each tensor, float64 on the CPU; summed in a fixed order, so equal on all ranks."""
    numels = torch.tensor([max(weight.numel(), 1) for weight in weights], dtype=torch.float64, device="cpu")
    return (ops.square_sum(weights).cpu() / numels).sqrt()
