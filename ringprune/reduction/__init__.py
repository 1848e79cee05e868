"""Stage 6: packed values are summed over the ranks."""

from ringprune.reduction.mean import Average, Mean
from ringprune.reduction.sparse import GatheredReduction, SparseReduction

__all__ = ["Average", "GatheredReduction", "Mean", "SparseReduction"]
