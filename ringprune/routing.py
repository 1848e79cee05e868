"""Which tensors travel packed and which dense, and when a packed one is cheaper sent whole."""

from dataclasses import dataclass

import torch

from ringprune.plan import ParamSpec
from ringprune.validation import whole_number

__all__ = ["AllDense", "LargeMatrices", "Routing", "sent_whole"]

PACKED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AllDense:
    """Everything travels dense."""

    def packed(self, spec: ParamSpec) -> bool:
        """Whether the parameter travels packed: never."""
        return False


@dataclass(frozen=True)
class LargeMatrices:
    """Tensors of at least two dimensions and ``min_numel`` entries travel packed, the rest dense.

    One-dimensional tensors (biases, norms) are few bytes and often start at zero, where a ratio to the weight means
    nothing. Float64 parameters travel dense as well: the residual is float32.

    Args:
        min_numel: smallest tensor worth packing.
    """

    min_numel: int = 2048

    def __post_init__(self) -> None:
        whole_number("min_numel", self.min_numel, 1)

    def packed(self, spec: ParamSpec) -> bool:
        """Whether the parameter travels packed."""
        return len(spec.shape) > 1 and spec.numel >= self.min_numel and spec.dtype in PACKED_DTYPES


Routing = AllDense | LargeMatrices


def sent_whole(density: float) -> bool:
    """Whether packed tensors are sent whole at this density, without indices.

    From a density of 2/3 on selection saves at most a third of the bytes, and costs every rank time.
    """
    return density >= 2 / 3
