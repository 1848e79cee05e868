"""Which examples this rank sees at which step: a seeded shuffle per epoch, divided among the ranks."""

import torch
from torch import Tensor

__all__ = ["Shards"]


class Shards:
    """The order in which ``size`` ranks go through ``count`` examples.

    The order of an epoch is a function of (seed, epoch) alone, computed with a generator of its own, so every rank
    knows it without a message and a restart needs only the number of the step. The examples left over at the end of
    an epoch are dropped for that epoch: every rank has the same number of batches, and nobody waits for a rank that
    has run out.

    Args:
        count: number of examples.
        batch_size: examples per rank and step.
        rank: number of this rank.
        size: number of ranks.
        seed: with the epoch, decides the order.
    """

    def __init__(self, count: int, batch_size: int, rank: int, size: int, seed: int) -> None:
        if count < batch_size * size:
            raise ValueError(
                f"batch_size={batch_size} on {size} ranks needs {batch_size * size} examples, there are {count}"
            )
        self.count, self.batch_size, self.rank, self.size, self.seed = count, batch_size, rank, size, seed
        self.steps_per_epoch = count // (batch_size * size)
        self._epoch = -1
        self._batches = torch.empty(0)

    def __getitem__(self, step: int) -> Tensor:
        """Indices ``(batch_size,)`` of this rank's examples at ``step``, counted from the start of training."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffle(epoch)
        return self._batches[place]

    def _shuffle(self, epoch: int) -> Tensor:
        order = torch.randperm(self.count, generator=generator(self.seed, epoch))
        used = self.steps_per_epoch * self.size * self.batch_size
        return order[:used].view(self.steps_per_epoch, self.size, self.batch_size)[:, self.rank]


def generator(*key: int) -> torch.Generator:
    """A generator that belongs to ``key``, for example (seed, epoch); torch's global one is not touched."""
    mixed = 0
    for part in key:
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(mixed)


def even_share(count: int, rank: int, size: int) -> slice:
    """This rank's slice of ``count`` examples that are all looked at once, as in validation."""
    return slice(count * rank // size, count * (rank + 1) // size)
