"""Whether the ranks still hold the same: hashes of parameters and index sets, compared every so many exchanges.

Costs one allgather of 16 bytes per rank; only where something differs are all hashes gathered, to name what.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from ringprune import counter_rng
from ringprune.comm.communicator import Communicator
from ringprune.errors import RankMismatchError
from ringprune.metrics import Metrics

__all__ = ["Drift", "fingerprint"]

BLOCK = 1 << 18
"""Entries that are hashed at once: it bounds the memory that hashing takes, to some MiB."""

SHOWN = 3
"""Tensors that an error names; where one differs, soon all do."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Drift:
    """Compares what should be equal on all ranks.

    Args:
        every: exchanges from one comparison to the next; 0 is never.
        comm: with whom.
        metrics: counts the bytes as headers.
    """

    def __init__(self, every: int, comm: Communicator, metrics: Metrics) -> None:
        self._every, self._comm, self._metrics = every, comm, metrics

    def due(self, step: int) -> bool:
        """Whether ranks compare after exchange number ``step``, counted from 1."""
        return self._every > 0 and step % self._every == 0

    def compare(self, step: int, tensors: Mapping[str, Tensor], sets: Mapping[str, Tensor | None]) -> None:
        """Compare with the other ranks; all of them call this.

        Args:
            step: exchanges made.
            tensors: what should be equal, by what an error calls it; the same names on all ranks.
            sets: index sets likewise; None or empty where a rank has none, which may then differ.

        Raises:
            RankMismatchError: something differs; on all ranks, naming it, the step, and the ranks that differ from
                most of the others.
        """
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        equal, agreed = _hashes(tensors.values(), device), _hashes(sets.values(), device)
        rows = self._gather(torch.stack([fingerprint(equal), fingerprint(agreed[agreed != 0])]), "hashes")
        if not _different(rows[0]) and not _different(rows[1], may_lack=True):
            return
        columns = self._gather(torch.cat([equal, agreed]), "hashes, each")
        findings = [
            (name, ranks)
            for place, (name, column) in enumerate(zip([*tensors, *sets], columns, strict=True))
            if (ranks := _different(column, may_lack=place >= len(tensors)))
        ]
        raise RankMismatchError(_text(step, findings))

    def _gather(self, row: Tensor, name: str) -> list[list[int]]:
        """For each number of ``row`` those of all ranks."""
        with self._metrics.sending("headers"):
            rows = self._comm.allgather(row, name=name).wait()
        columns: list[list[int]] = rows.view(self._comm.size, -1).t().tolist()
        return columns


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits, int64, 0-dim, on its device; the same on all devices, 0 for no entries.

    Entries are multiplied by odd numbers drawn for their places and added, modulo 2^64: one entry that differs is
    always found, several but for one chance in 2^32 or less.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().view(-1).view(_WORDS[plain.element_size()])
    factors = _factors(tensor.device)
    total = bits.numel() * factors[-1]
    for number, block in enumerate(torch.split(bits, BLOCK)):
        total = total + (block * factors[: block.numel()]).sum() * factors[-2 - number]
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, int64."""
    drawn = counter_rng.words(BLOCK, 0)
    return torch.from_numpy(drawn.view("int64")).bitwise_or(1).to(device)


def _hashes(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """One for each, int64, shape ``(n,)``; 0 where there is none."""
    hashes = [
        torch.zeros((), dtype=torch.int64, device="cpu") if each is None else fingerprint(each) for each in tensors
    ]
    return torch.stack([each.to(device) for each in [torch.zeros((), dtype=torch.int64, device="cpu"), *hashes]])[1:]


def _different(column: list[int], *, may_lack: bool = False) -> list[int]:
    """The ranks whose number is not that of most ranks, of several the one of the lowest rank; 0 may be lacking."""
    held = [number for number in column if number or not may_lack]
    if not held:
        return []
    usual = Counter(held).most_common(1)[0][0]
    return [rank for rank, number in enumerate(column) if number != usual and (number or not may_lack)]


def _text(step: int, findings: list[tuple[str, list[int]]]) -> str:
    parts = [f"{name} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for name, ranks in findings[:SHOWN]]
    more = len(findings) - SHOWN
    return (
        f"after exchange {step} the ranks no longer hold the same: {'; '.join(parts)}"
        + (f"; and {more} more" if more > 0 else "")
        + ". A rank that has changed them by itself, or computed otherwise, is one cause; go on from a checkpoint of "
        "before"
    )
