"""Find the entries of largest score in every tensor: stage 3 of the exchange."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError
from ringprune.ops.checks import check_flat, check_integers, check_length, check_offsets
from ringprune.ops.library import call, define

__all__ = ["select"]

SCHEMA = "select(Tensor scores, int[] offsets, int[] counts) -> Tensor"


def select(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Positions of the ``counts[i]`` largest scores of every tensor i, exactly.

    Equal scores go to the lowest positions. NaN (of any sign) ranks above infinity, -0.0 equals +0.0, and negative
    scores rank by value.

    Args:
        scores: float32 [N], the tensors' scores one after another.
        offsets: T + 1 numbers, where each tensor starts in ``scores``; from 0 to N, not falling.
        counts: T numbers of entries to select, each from 0 to the entries of its tensor.

    Returns:
        Positions in ``scores``, int64 [sum(counts)], strictly ascending.

    Raises:
        ConfigurationError: a shape, the offsets or a count do not fit.
        ArgumentTypeError: a dtype does not fit.
    """
    check_flat("select", "scores", scores, torch.float32)
    check_offsets("select", offsets, scores.numel())
    check_integers("select", "counts", counts)
    check_length("select", "counts", counts, len(offsets) - 1)
    for i, count in enumerate(counts):
        entries = offsets[i + 1] - offsets[i]
        if not 0 <= count <= entries:
            raise ConfigurationError(
                f"select: counts[{i}] = {count}; 0 to {entries} is allowed, the entries of tensor {i}"
            )
    indices: Tensor = call(_select, scores, offsets, counts)
    return indices


def select_reference(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    """:func:`select` in torch."""
    keys = _ordered_keys(scores)
    parts = []
    for (start, end), count in zip(pairwise(offsets), counts, strict=True):
        if count > 0:
            parts.append(_largest(keys[start:end], count) + start)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=scores.device)


def _ordered_keys(scores: Tensor) -> Tensor:
    """int32 keys that compare as the scores do, with NaN on top and one zero."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats: the larger magnitude is the smaller key
    return keys.masked_fill(scores.isnan(), torch.iinfo(torch.int32).max)


def _largest(keys: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest keys, ascending; ties go to the lowest."""
    threshold = keys.topk(count).values[-1]
    above, tied = keys > threshold, keys == threshold
    wanted_ties = count - above.sum()
    return (above | (tied & (tied.cumsum(0) <= wanted_ties))).nonzero().reshape(-1)


def _select_fake(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    return torch.empty(sum(counts), dtype=torch.int64, device=scores.device)


_select = define(SCHEMA, select_reference, _select_fake)
