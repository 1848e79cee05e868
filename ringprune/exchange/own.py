"""A bucket of which every rank sends entries of its own choice: nothing is agreed upon, and sums are sparse."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ringprune import packing
from ringprune.devices import to_device
from ringprune.exchange.lane import Setting, UnderWay
from ringprune.exchange.packed import PackedLane
from ringprune.metrics import Content
from ringprune.ops import PAD
from ringprune.plan import Bucket
from ringprune.reduction import GatheredReduction, SparseReduction

__all__ = ["OwnLane"]

PAIRS: dict[Content, float] = {"indices": 0.5, "values": 0.5}


class OwnLane(PackedLane):
    """Stages 1 to 7 of a bucket whose ranks each keep an index set of their own.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting)
        self._sum: GatheredReduction | SparseReduction | None = None

    def _shares(self, step: int, density: float) -> list[int]:
        """Entries that each rank sends of each tensor."""
        return self._budgets(density)

    def _is_root(self, step: int) -> bool:
        """Every rank selects."""
        return any(self._counts)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        metrics = self._setting.metrics
        with metrics.stage("pack"):
            self._indices = None if self._positions is None else self._positions[self._positions != PAD]
            values = self._pack()
        if self._indices is None:
            self._reduce(values)
            yield from self._rounds()
            return
        with metrics.stage("reduce"), metrics.sending(PAIRS, self.bucket.index):
            kind = GatheredReduction if self._setting.policy.index_sets == "gathered" else SparseReduction
            name = f"bucket {self.bucket.index} own values"
            self._sum = kind(self._setting.comm, self._indices.cpu(), values.cpu(), self.bucket.numel, name=name)
        while self._sum.unfinished:
            yield self._sum
            with metrics.stage("reduce"), metrics.sending(PAIRS, self.bucket.index):
                self._sum.advance()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the sums, write their averages at all ranks' indices; the new state takes effect."""
        if self._sum is None:
            super().finish(outputs)
            return
        metrics, device = self._setting.metrics, self.bucket.device
        with metrics.stage("reduce"), metrics.sending(PAIRS, self.bucket.index):
            indices, values = self._sum.wait()
        self._sum = None
        with metrics.stage("unpack"):
            self._setting.mean.scale(values, self._setting.comm.size)
            self.agreed = to_device(indices, device)
            packing.unpack(outputs, self.agreed, to_device(values, device))
            self._complete(outputs)

    def abandon(self) -> None:
        """Wait for the last message and forget it; the state is as it was before."""
        if self._sum is None:
            super().abandon()
            return
        with self._setting.metrics.sending(PAIRS, self.bucket.index):
            self._sum.drain()
        self._sum = None
        self._roll_back()
