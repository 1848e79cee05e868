"""A packed bucket whose ranks explore each for itself: what they draw travels with indices, beside the shared set."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import agreement, selection
from ringprune.devices import to_device
from ringprune.exchange.ahead import AheadLane
from ringprune.exchange.lane import Setting, UnderWay
from ringprune.exchange.summing import SummingLane
from ringprune.plan import Bucket
from ringprune.reduction import SparseReduction

__all__ = ["AheadExploringLane", "ExploringLane"]


class ExploringLane(SummingLane[SparseReduction]):
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
        own, self._own_values = (self._own.cpu(), self._own_values.cpu()), None
        comm, numel, name = self._setting.comm, self.bucket.numel, f"bucket {self.bucket.index} explored values"
        yield from self._sum_up(lambda: SparseReduction(comm, *own, numel, name=name))

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for both sums, write their averages; the new state takes effect."""
        if self._sum is not None:
            self._sums = self._wait_for_averages()
        super().finish(outputs)

    def _unpack(self, outputs: Sequence[Tensor], indices: Tensor | None, values: Tensor) -> None:
        """No rank explores where the set was agreed, so the two have no position in common."""
        if indices is not None and self._sums is not None:
            indices, order = torch.cat([indices, self._sums[0]]).sort()
            values, self._sums = torch.cat([values, self._sums[1]])[order], None
        super()._unpack(outputs, indices, values)


class AheadExploringLane(AheadLane, ExploringLane):
    """The same, with the agreed set chosen one step ahead."""
