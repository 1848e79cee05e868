"""A packed bucket whose ranks explore each for itself: what they draw travels with indices, beside the shared set."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import agreement, selection
from ringprune.devices import to_device
from ringprune.exchange.ahead import AheadLane
from ringprune.exchange.lane import Setting, UnderWay
from ringprune.exchange.packed import PackedLane
from ringprune.metrics import Content
from ringprune.plan import Bucket
from ringprune.reduction import SparseReduction

__all__ = ["AheadExploringLane", "ExploringLane"]

PAIRS: dict[Content, float] = {"indices": 0.5, "values": 0.5}


class ExploringLane(PackedLane):
    """Stages 1 to 7, as Slim-DP has them (arXiv 1709.09393): core values without indices, explored ones in pairs.

    An explored entry is sent by the ranks that drew it, each its own residual there; drawn entries that lie in the
    agreed set are left out.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    passes_next = False  # a second set is taken

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting)
        self._own: Tensor | None = None
        self._own_values: Tensor | None = None
        self._sum: SparseReduction | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    def _prepare(self, step: int) -> None:
        self._own = None
        super()._prepare(step)

    def _draw(self, drawn: Sequence[int], step: int) -> Tensor | None:
        """This rank's own positions; none of all ranks."""
        setting, bucket = self._setting, self.bucket
        own = selection.explore(drawn, bucket.offsets, setting.seed, step, bucket.index, setting.comm.rank)
        self._own = to_device(own, bucket.device)
        return None

    def _pack(self) -> Tensor:
        """[5] Values leave the residual at the agreed set, and at this rank's own positions outside of it."""
        if self._own is None or self._indices is None:
            return super()._pack()
        self._own = self._own[~torch.isin(self._own, self._indices)]
        values = super()._pack()
        self._own_values = self._take(self._own)
        return values

    def _count(self, indices: Tensor | None) -> None:
        if indices is not None and self._own is not None:
            indices = agreement.union([indices, self._own], self.bucket.device)
        super()._count(indices)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        yield from super()._messages(step)
        if self._own is None or self._own_values is None:
            return
        metrics, index = self._setting.metrics, self.bucket.index
        with metrics.stage("reduce"), metrics.sending(PAIRS, index):
            name = f"bucket {index} explored values"
            own = self._own.cpu(), self._own_values.cpu()
            self._sum = SparseReduction(self._setting.comm, *own, self.bucket.numel, name=name)
            self._own_values = None
        while self._sum.unfinished:
            yield self._sum
            with metrics.stage("reduce"), metrics.sending(PAIRS, index):
                self._sum.advance()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for both sums, write their averages; the new state takes effect."""
        if self._sum is not None:
            with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(PAIRS, self.bucket.index):
                indices, sums = self._sum.wait()
            self._setting.mean.scale(sums, self._setting.comm.size)
            self._sum, self._sums = None, (to_device(indices, self.bucket.device), to_device(sums, self.bucket.device))
        super().finish(outputs)

    def _unpack(self, outputs: Sequence[Tensor], indices: Tensor | None, values: Tensor) -> None:
        """No rank explores where the set was agreed, so the two have no position in common."""
        if indices is not None and self._sums is not None:
            indices, order = torch.cat([indices, self._sums[0]]).sort()
            values, self._sums = torch.cat([values, self._sums[1]])[order], None
        super()._unpack(outputs, indices, values)

    def abandon(self) -> None:
        """Wait for the last messages and forget them; the state is as it was before."""
        if self._sum is not None:
            with self._setting.metrics.sending(PAIRS, self.bucket.index):
                self._sum.drain()
            self._sum = None
        super().abandon()


class AheadExploringLane(AheadLane, ExploringLane):
    """The same, with the agreed set chosen one step ahead."""
