"""Stage 6: packed values are summed over the ranks."""

from ringprune.reduction.mean import Mean, Reduction

__all__ = ["Mean", "Reduction"]
