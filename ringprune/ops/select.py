"""Find the entries of largest score in every tensor: stage 3 of the exchange."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError
from ringprune.ops.checks import check_flat, check_integers, check_length, check_offsets, check_positions
from ringprune.ops.library import call, define

__all__ = ["PAD", "check_counts", "select"]

SCHEMA = "select(Tensor scores, int[] offsets, int[] counts) -> Tensor"

PAD = -1
"""Fills what is left of a tensor's share of the positions where it has fewer scores above zero than asked for."""


def select(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Positions of the ``counts[i]`` largest scores of every tensor i, exactly.

    Equal scores go to the lowest positions. NaN (of any sign) ranks above infinity. A score of zero or below is never
    selected: where a tensor has fewer scores above zero than asked for, its share is filled up with ``PAD`` (-1).

    Args:
        scores: float32 [N], the tensors' scores one after another; N below 2**31.
        offsets: T + 1 numbers, where each tensor starts in ``scores``; from 0 to N, not falling.
        counts: T numbers of entries to select, each from 0 to the entries of its tensor.

    Returns:
        Positions in ``scores``, int32 [sum(counts)]: tensor by tensor ``counts[i]`` of them, strictly ascending, then
        pads.

    Raises:
        ConfigurationError: a shape, the offsets or a count do not fit.
        ArgumentTypeError: a dtype does not fit.
    """
    positions: Tensor = call(_select, scores, offsets, counts)
    return positions


def check_counts(op: str, counts: Sequence[int], numels: Sequence[int]) -> None:
    """Refuse counts that are not one int per tensor, between 0 and its entries."""
    check_integers(op, "counts", counts)
    check_length(op, "counts", counts, len(numels))
    for i, (count, entries) in enumerate(zip(counts, numels, strict=True)):
        if not 0 <= count <= entries:
            raise ConfigurationError(
                f"{op}: counts[{i}] = {count}; 0 to {entries} is allowed, the entries of tensor {i}"
            )


def check_select(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> None:
    """Refuse arguments of :func:`select` that do not fit."""
    check_flat("select", "scores", scores, torch.float32)
    check_positions("select", scores.numel())
    check_offsets("select", offsets, scores.numel())
    check_counts("select", counts, [end - start for start, end in pairwise(offsets)])


def select_reference(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    """:func:`select` in torch."""
    keys = _ordered_keys(scores)
    positions = torch.full((sum(counts),), PAD, dtype=torch.int32, device=scores.device)
    written = 0
    for (start, end), count in zip(pairwise(offsets), counts, strict=True):
        if count > 0:
            largest = _largest(keys[start:end], count) + start
            positions[written : written + len(largest)] = largest
        written += count
    return positions


def _ordered_keys(scores: Tensor) -> Tensor:
    """int32 keys that compare as the scores do, with every NaN on top, and 0 for what is never selected."""
    keys = torch.where(scores > 0, scores, 0.0).view(torch.int32)
    return keys.masked_fill(scores.isnan(), torch.iinfo(torch.int32).max)


def _largest(keys: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest keys above zero, ascending; ties go to the lowest."""
    threshold = keys.topk(count).values[-1]
    above, tied = keys > threshold, keys == threshold
    wanted_ties = count - above.sum()
    return ((above | (tied & (tied.cumsum(0) <= wanted_ties))) & (keys > 0)).nonzero().reshape(-1)


def _select_fake(scores: Tensor, offsets: Sequence[int], counts: Sequence[int]) -> Tensor:
    return torch.empty(sum(counts), dtype=torch.int32, device=scores.device)


_select = define(SCHEMA, check_select, select_reference, _select_fake)
