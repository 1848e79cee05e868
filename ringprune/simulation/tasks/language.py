"""Predicting the next symbol: the data of the three text tasks."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringprune.simulation.tasks.source_text import Text
from ringprune.simulation.tasks.task import Score

__all__ = ["NextSymbol", "SampledOutput"]

JUDGED_AT_ONCE = 64  # windows


class NextSymbol:
    """Windows of a text at random places; a model predicts at every place of a window the symbol that follows.

    Args:
        text: what is read.
        length: symbols that a model sees at once.
    """

    def __init__(self, text: Text, length: int) -> None:
        self.text, self.length = text, length
        self.places = torch.arange(length + 1)

    @property
    def digest(self) -> str:
        """That of the text."""
        return self.text.digest

    def order(self, steps: int, ranks: int, batch: int, seed: int) -> Tensor:
        """Where windows start, drawn evenly from the whole training text."""
        last = len(self.text.train) - self.length - 1
        return torch.randint(last, (steps, ranks, batch), generator=torch.Generator().manual_seed(seed))

    def loss(self, model: nn.Module, chosen: Tensor, draws: torch.Generator) -> Tensor:
        """Mean cross entropy of the windows that start at ``chosen``."""
        window = self.text.train[chosen.unsqueeze(1) + self.places]
        return _entropy(model(window[:, :-1]), window[:, 1:], "mean")

    @torch.no_grad()
    def score(self, model: nn.Module, share: float) -> Score:
        """Nats per symbol of the files held out."""
        windows = self.text.windows(share, self.length)
        parts = torch.split(windows, JUDGED_AT_ONCE)
        total = math.fsum(float(_entropy(model(part[:, :-1]), part[:, 1:], "sum")) for part in parts)
        mean = total / (windows.shape[0] * self.length)
        return Score(loss=mean, value=mean)


class Tied(Protocol):
    """A model whose input embedding is its output matrix too."""

    embedding: nn.Embedding

    def states(self, symbols: Tensor) -> Tensor:
        """One vector per place."""
        ...


class SampledOutput(NextSymbol):
    """The same, where training compares the right word with some drawn ones instead of the whole vocabulary.

    A sampled softmax (Jean et al., ACL 2015, arXiv 1412.2007): negatives are drawn evenly in log(rank), as frequencies
    are, one set per rank and step, and every score is lowered by the log of how often its word is expected among them.
    So a step's gradient touches only the embedding rows of its own words and of the negatives. Judging is exact.

    Args:
        text: what is read; the numbers of words are in the order of their frequency.
        length: symbols that a model sees at once.
        negatives: words drawn.
    """

    def __init__(self, text: Text, length: int, negatives: int) -> None:
        super().__init__(text, length)
        self.negatives = negatives
        ranks = torch.arange(1, text.symbols + 2, dtype=torch.float64)
        probability = torch.log(ranks[1:] / ranks[:-1]) / math.log(text.symbols + 1)
        self.expected = torch.log(negatives * probability).float()

    def loss(self, model: nn.Module, chosen: Tensor, draws: torch.Generator) -> Tensor:
        """Mean sampled cross entropy of the windows that start at ``chosen``."""
        assert isinstance(model, nn.Module)
        window = self.text.train[chosen.unsqueeze(1) + self.places]
        negatives = self._draw(draws)
        return _sampled(model, window[:, :-1], window[:, 1:].flatten(), negatives, self.expected)  # type: ignore[arg-type]  # a module that is Tied

    def _draw(self, draws: torch.Generator) -> Tensor:
        even = torch.rand(self.negatives, generator=draws, dtype=torch.float64)
        return (torch.exp(even * math.log(self.text.symbols + 1)) - 1).long().clamp_(max=self.text.symbols - 1)


def _sampled(model: Tied, read: Tensor, right: Tensor, negatives: Tensor, expected: Tensor) -> Tensor:
    states = model.states(read).flatten(0, 1)
    own = (states * model.embedding(right)).sum(1) - expected[right]
    others = states @ model.embedding(negatives).T - expected[negatives]
    others = others.masked_fill(right.unsqueeze(1) == negatives, -math.inf)
    scores = torch.cat([own.unsqueeze(1), others], dim=1)
    return functional.cross_entropy(scores, torch.zeros_like(right))


def _entropy(scores: Tensor, right: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), right.flatten(), reduction=reduction)
