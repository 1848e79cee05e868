"""A table whose sparse gradient the test gives, and what should come of it, in float64; and a small model of words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.routing import WAYS

__all__ = [
    "EPS",
    "LENGTH",
    "WAYS",
    "Lookup",
    "Table",
    "drawn",
    "exact",
    "loss_of_words",
    "make_words",
    "tables_of",
    "within",
]

EPS = torch.finfo(torch.float32).eps
LENGTH, BATCH = 60, 8

Lookup = tuple[Sequence[int], Tensor]
"""Rows looked up, perhaps some of them twice, and what is added to the gradient of each."""


class Table:
    """A wrapped SGD of one embedding, ``length`` x ``width``, at learning rate 1 unless given.

    Args:
        comm: the communicator.
        policy: the policy.
        length: rows.
        width: entries of a row.
        dtype: of the weight.
        padding: a row whose gradient is zero.
        options: of the wrapper.
    """

    def __init__(
        self,
        comm: rp.comm.Communicator,
        policy: rp.Policy,
        length: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        padding: int | None = None,
        **options: Any,
    ) -> None:
        weight = torch.randn(length, width, generator=torch.Generator().manual_seed(3)).to(dtype)
        self.model = nn.Embedding(length, width, padding_idx=padding, sparse=True, _weight=weight)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = rp.DistributedOptimizer(
            inner, self.model.named_parameters(), policy=policy, comm=comm, model=self.model, **options
        )

    def backward(self, lookup: Lookup) -> None:
        rows, gradients = lookup
        (self.model(torch.tensor(rows, dtype=torch.int64)) * gradients.to(self.model.weight.dtype)).sum().backward()

    def step(self, lookup: Lookup | None) -> Tensor:
        """One step with this rank's gradient, or none; the average, sparse."""
        self.optimizer.zero_grad()
        if lookup is not None:
            self.backward(lookup)
        self.optimizer.step()
        assert self.model.weight.grad is not None
        return self.model.weight.grad


def drawn(key: int, count: int, length: int, width: int) -> Lookup:
    """``count`` lookups of rows drawn with repetition."""
    generator = torch.Generator().manual_seed(key)
    rows = torch.randint(0, length, (count,), generator=generator).tolist()
    return rows, torch.randn(count, width, generator=generator)


def exact(lookups: Sequence[Lookup | None], length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that some rank has; the sum over the ranks, and that of the magnitudes, in float64."""
    total, magnitude = torch.zeros(2, length, width, dtype=torch.float64)
    seen = torch.zeros(length, dtype=torch.bool)
    for rows, gradients in (lookup for lookup in lookups if lookup is not None):
        at = torch.tensor(rows, dtype=torch.int64)
        total.index_add_(0, at, gradients.double())
        magnitude.index_add_(0, at, gradients.double().abs())
        seen[at] = True
    return seen.nonzero().flatten(), total, magnitude


def within(got: Tensor, total: Tensor, magnitude: Tensor, terms: int) -> bool:
    """Whether ``got`` is ``total`` but for ``terms`` roundings in float32, none of more than the sum of magnitudes."""
    return bool(((got.double() - total).abs() <= terms * EPS / 2 * magnitude + 2**-140).all())


def make_words() -> nn.Module:
    """Two tables, one of bags, and a linear layer."""
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(LENGTH, 16, sparse=True),
            "bags": nn.EmbeddingBag(LENGTH, 16, sparse=True, mode="sum"),
            "out": nn.Linear(16, 200),
        }
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def loss_of_words(model: nn.Module, rank: int, step: int) -> Tensor:
    """A sum, so that a joined batch has the sum of the ranks' losses."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, LENGTH, (BATCH,), generator=generator)
    bags = torch.randint(0, LENGTH, (BATCH, 3), generator=generator)
    hidden = torch.tanh(model["words"](words) + model["bags"](bags))
    target = torch.randint(0, 200, (BATCH,), generator=generator)
    return nn.functional.cross_entropy(model["out"](hidden), target, reduction="sum")


def tables_of(model: nn.Module) -> list[Tensor]:
    return [model["words"].weight, model["bags"].weight]
