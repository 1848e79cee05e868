"""Stage 2: how important an entry is, relative to its weight.

The score of Importance Weighted Pruning (arXiv 1901.01544) is the ratio of gradient to weight, ``|g / w|``. Taken raw
it chases small weights; RingPrune adds a share of the tensor's root mean square to the denominator (docs/papers.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringprune import ops
from ringprune.validation import real_number

_LARGEST = torch.finfo(torch.float32).max

__all__ = ["RMS_REFRESH", "Ratio", "root_mean_square"]

RMS_REFRESH = 50
"""Steps between two readings of the weights' root mean square; a weight's scale drifts over thousands."""


@dataclass(frozen=True)
class Ratio:
    """``|residual| / (|weight| + damping * rms(weights of the tensor) + eps)``.

    Args:
        damping: share of the tensor's rms that is added to every weight; 0 is the paper's raw ratio.
        eps: keeps the ratio finite where a weight and the rms are zero.
    """

    damping: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        real_number("damping", self.damping, least=0)
        real_number("eps", self.eps, above=0)

    def scores(self, residual: Tensor, weights: Sequence[Tensor], rms: Tensor) -> Tensor:
        """[2] Score every entry of a bucket.

        Args:
            residual: float32, shape ``(n,)``, the bucket's residual.
            weights: the bucket's tensors, contiguous, n entries together.
            rms: float64, one per tensor, from :func:`root_mean_square`.

        Returns:
            float32 scores, shape ``(n,)``, not negative.
        """
        # The rms of weights that are not finite is not either; a rank that raised here would leave the others waiting.
        floors = [self.damping * value + self.eps for value in rms.tolist()]
        floors = [floor if floor < _LARGEST else _LARGEST for floor in floors]
        return ops.importance(residual, weights, floors=floors)


def root_mean_square(weights: Sequence[Tensor]) -> Tensor:
    """The root mean square of each tensor, float64 on the CPU; summed in a fixed order, so equal on all ranks."""
    numels = torch.tensor([max(weight.numel(), 1) for weight in weights], dtype=torch.float64)
    return (ops.square_sum(weights).cpu() / numels).sqrt()
