"""A bucket of which every rank sends entries of its own choice: nothing is agreed upon, and sums are sparse."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ringprune import packing, selection
from ringprune.exchange.lane import UnderWay
from ringprune.exchange.summing import SummingLane
from ringprune.reduction import GatheredReduction, SparseReduction

__all__ = ["OwnLane"]


class OwnLane(SummingLane[GatheredReduction | SparseReduction]):
    """Stages 1 to 7 of a bucket whose ranks each keep an index set of their own.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def _shares(self, step: int, density: float) -> list[int]:
        """Entries that each rank sends of each tensor."""
        return self._budgets(density)

    def _is_root(self, step: int) -> bool:
        """Every rank selects."""
        return any(self._counts)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        setting, numel = self._setting, self.bucket.numel
        with setting.metrics.stage("pack"):
            indices = self._indices = None if self._positions is None else selection.unpadded(self._positions)
            values = self._pack()
        if indices is None:
            self._reduce_taken(values)
            yield from self._rounds()
            return
        kind = GatheredReduction if setting.policy.index_sets == "gathered" else SparseReduction
        name = f"bucket {self.bucket.index} own values"
        yield from self._sum_up(lambda: kind(setting.comm, indices.cpu(), values.cpu(), numel, name=name))

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the sums, write their averages at all ranks' indices; the new state takes effect."""
        if self._sum is None:
            super().finish(outputs)
            return
        self.agreed, averages = self._wait_for_averages()
        with self._setting.metrics.stage("unpack"):
            packing.unpack(outputs, self.agreed, averages)
            self._complete(outputs)
