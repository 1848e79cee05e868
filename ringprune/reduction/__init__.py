"""Stage 6: packed values are summed over the ranks."""

from ringprune.reduction.mean import Average, Mean

__all__ = ["Average", "Mean"]
