"""Words to look up: drawn as often as words of a language are, and a model of a table and layers that wait."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from replays.model import Waiting
from torch import Tensor, nn

from ringprune.profiles.format import Layer, Profile

__all__ = ["Size", "WordModel", "batches"]

LAYERS = 4


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        rows: of the table.
        dim: entries of a row.
        tokens: looked up by a rank in a step.
        dense: entries of the other parameters.
        exponent: of Zipf's law, by which words are drawn: the r-th is as frequent as ``r ** -exponent``.
        compute_ms: milliseconds of a forward and backward pass.
    """

    rows: int
    dim: int
    tokens: int
    dense: int
    exponent: float
    compute_ms: float


class WordModel(nn.Module):
    """A table, and layers that take as long as they are told and compute nothing.

    Args:
        table: an embedding.
        size: of the layers.
        scale: what their times are multiplied by.
    """

    def __init__(self, table: nn.Module, size: Size, scale: float) -> None:
        super().__init__()
        self.table = table
        each = max(1, size.dense // LAYERS)
        share = size.compute_ms / LAYERS / 3  # a backward pass takes about twice as long as a forward pass
        layers = [Layer(f"layer {i}", (each,), share, 2 * share) for i in range(LAYERS)]
        self.rest = Waiting(Profile("rest", "made up", tuple(layers)), scale)

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        rows: Tensor = self.table(words)
        out: Tensor = self.rest() + rows.sum()
        return out


def batches(size: Size, rank: int, seed: int) -> Iterator[Tensor]:
    """What a rank looks up, step by step: int64, shape ``(tokens,)``."""
    frequencies = np.arange(1, size.rows + 1, dtype=np.float64) ** -size.exponent
    ends = np.cumsum(frequencies / frequencies.sum())
    generator = np.random.default_rng([seed, rank])
    while True:
        drawn = np.searchsorted(ends, generator.random(size.tokens) * ends[-1])
        yield torch.from_numpy(drawn.astype(np.int64))
