"""Validation divided among the ranks: each looks at its share, and the counts are summed."""

from collections.abc import Callable, Iterable

import ranks
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["accuracy", "average_statistics", "mean_loss"]

Batches = Iterable[tuple[Tensor, Tensor]]


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Share of right answers over the batches of all ranks."""
    return _mean(model, batches, lambda scores, labels: (scores.argmax(dim=-1) == labels).sum())


def mean_loss(model: nn.Module, batches: Batches) -> float:
    """Cross entropy per prediction, in nats, over the batches of all ranks."""
    return _mean(
        model, batches, lambda scores, labels: cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")
    )


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Average the running statistics of batch normalisation, which every rank keeps for itself."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(ranks.mean(buffer))


@torch.no_grad()
def _mean(model: nn.Module, batches: Batches, measure: Callable[[Tensor, Tensor], Tensor]) -> float:
    model.eval()
    total, count = 0.0, 0
    for inputs, labels in batches:
        total += float(measure(model(inputs), labels))
        count += labels.numel()
    model.train()
    summed = ranks.total(torch.tensor([total, count], dtype=torch.float64))
    return float(summed[0] / summed[1])
