"""What a bucket sends at one exchange after warm-up: the formulas of docs/wire-format.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ringprune.errors import ConfigurationError
from ringprune.metrics import Content
from ringprune.plan import Bucket, Route
from ringprune.policies.policy import Policy
from ringprune.prediction.link import Kind, Network
from ringprune.reduction.ring import chunk_counts
from ringprune.routing import sent_whole
from ringprune.selection import budgets, shares
from ringprune.wire import ValueCode, index_code, value_code

__all__ = [
    "Message",
    "bytes_sent",
    "check_predictable",
    "kept",
    "messages",
    "proposed",
    "roots",
    "value_code_of",
    "verdict",
]


@dataclass(frozen=True)
class Message:
    """One collective, or several alike that are started at once.

    Attributes:
        kind: which.
        payload: bytes, as :meth:`ringprune.prediction.Link.seconds` takes them.
        contents: what it is counted as, and in which parts.
        share: of the exchanges that have it.
        count: how many of them.
    """

    kind: Kind
    payload: float
    contents: tuple[tuple[Content, float], ...]
    share: float = 1.0
    count: int = 1

    def seconds(self, link: Network, ranks: int) -> float:
        """What it takes on average while nothing else is sent."""
        return self.share * self.count * link.seconds(self.kind, self.payload, ranks)

    def bytes_sent(self, ranks: int) -> float:
        """Bytes that a rank hands to the network per exchange, as the mean over the ranks."""
        factor = {"allreduce": 2 * (ranks - 1) / ranks, "alltoall": 1.0, "ring": 1.0}
        return self.share * self.count * self.payload * factor.get(self.kind, (ranks - 1) / ranks)


_MODELLED = {
    "turns": 1,
    "layers": "even",
    "smoothing": 0.0,
    "explore_by": "seed",
    "schedule": None,
    "rows": None,
    "lookahead": False,
}


def check_predictable(policy: Policy) -> None:
    """Refuse a policy whose messages are not known beforehand, or not in this order.

    Raises:
        ConfigurationError: names the choice.
    """
    for slot, value in _MODELLED.items():
        if getattr(policy, slot) != value:
            raise ConfigurationError(
                f"policy {policy.name!r} with {slot}={getattr(policy, slot)!r} cannot be predicted, only {value!r}: "
                f"measure it with mpi_scripts/{'bench_embedding.py' if slot == 'rows' else 'replay.py'}"
            )
    if policy.clipping.norm is not None:
        raise ConfigurationError(
            f"policy {policy.name!r} with clip_norm cannot be predicted: it exchanges after the backward pass; measure "
            "it with mpi_scripts/replay.py"
        )
    if policy.index_sets not in ("shared", "gathered"):
        raise ConfigurationError(
            f"policy {policy.name!r} with index_sets={policy.index_sets!r} cannot be predicted: its bytes depend on "
            "the gradients; measure it with mpi_scripts/replay.py"
        )


def kept(bucket: Bucket, policy: Policy, ranks: int) -> int:
    """Entries of the index set, at most: proposals of several roots, and what is explored, may overlap.

    With gathered index sets it is a rank's own.
    """
    budget = budgets(bucket.numels, policy.density.target)
    drawn, counts = shares(budget, policy.explore, roots(policy, ranks))
    number, tensors = roots(policy, ranks), zip(bucket.numels, drawn, counts, strict=True)
    return sum(min(numel, e + number * c) for numel, e, c in tensors)


def proposed(bucket: Bucket, policy: Policy, ranks: int) -> int:
    """Positions in the message of one root."""
    budget = budgets(bucket.numels, policy.density.target)
    return sum(shares(budget, policy.explore, roots(policy, ranks))[1])


def messages(bucket: Bucket, policy: Policy, ranks: int, route: Route) -> list[Message]:
    """The messages of one exchange, in their order.

    Args:
        bucket: the tensors.
        policy: how they are exchanged, after warm-up.
        ranks: with how many others and oneself.
        route: ``"packed"``, or ``"dense"`` to send the bucket whole.
    """
    content: Content = "dense" if route == "dense" else "values"
    if route == "dense" or sent_whole(policy.density.target):
        return list(_sum(bucket.numel, bucket.dtype, policy, ranks, content))
    count = kept(bucket, policy, ranks)
    if policy.index_sets == "gathered":
        pairs: tuple[tuple[Content, float], ...] = (("indices", 0.5), ("values", 0.5))
        return [Message("allgather", 4 * ranks, pairs), Message("allgather", 8 * count * ranks, pairs)]
    positions = proposed(bucket, policy, ranks)
    sums = list(_sum(count, torch.float32, policy, ranks, content))
    return [*_proposals(positions, bucket.numel, policy, ranks), *sums] if positions else sums


def verdict(policy: Policy) -> Message:
    """What all ranks tell one another of a step: more in update mode, and most about intervals that grow."""
    steps = policy.local_steps
    numbers = 4 * 3 if steps is None else 8 * 9 if steps.growth else 4 * 7
    return Message("allreduce", numbers, (("headers", 1.0),))


def bytes_sent(found: Sequence[Message], ranks: int) -> dict[Content, float]:
    """Bytes that a rank hands to the network per exchange, by content."""
    total: dict[Content, float] = {}
    for message in found:
        for content, part in message.contents:
            total[content] = total.get(content, 0.0) + part * message.bytes_sent(ranks)
    return total


def value_code_of(policy: Policy, content: Content, count: int, ranks: int) -> ValueCode | None:
    """How ``count`` float32 values travel; None as they are, also where a code would not be shorter."""
    code = value_code(policy.values if content == "values" else policy.dense_values)
    longest = -(-count // ranks)
    return None if code is None or code.size(longest) >= 4 * longest else code


def roots(policy: Policy, ranks: int) -> int:
    """How many ranks propose; with index sets of their own each decides for itself."""
    return 1 if policy.index_sets != "shared" else policy.roots.number(ranks)


def _proposals(positions: int, numel: int, policy: Policy, ranks: int) -> Iterator[Message]:
    size, number = index_code(positions, numel, policy.index_format).size, roots(policy, ranks)
    share = 1 / policy.refresh
    if number == ranks:
        yield Message("allgather", size * number, (("indices", 1.0),), share)
        return
    yield Message("broadcast", size, (("indices", 1.0),), share, number)


def _sum(count: int, dtype: torch.dtype, policy: Policy, ranks: int, content: Content) -> Iterator[Message]:
    """A sum over the ranks: one allreduce, an alltoall and an allgather of coded regions, or our ring."""
    contents = ((content, 1.0),)
    coded = value_code_of(policy, content, count, ranks) if dtype == torch.float32 else None
    if policy.reduction == "ring" and dtype == torch.float32:
        chunks = chunk_counts(count, ranks)
        size = sum(4 * n if coded is None else coded.size(n) for n in chunks)
        yield Message("ring", 2 * (ranks - 1) * size, contents)
    elif coded is None:
        yield Message("allreduce", dtype.itemsize * count, contents)
    else:
        short, longer = divmod(count, ranks)  # so many ranks have a region of one value more
        regions = longer * coded.size(short + 1) + (ranks - longer) * coded.size(short)
        yield Message("alltoall", regions * (ranks - 1) / ranks, contents)
        yield Message("allgather", regions, contents)
