"""A packed bucket with a sparse sum of its own, made in several messages: in place of the reduction, or behind it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import Tensor

from ringprune.devices import to_device
from ringprune.exchange.lane import Setting, UnderWay
from ringprune.exchange.packed import PackedLane
from ringprune.plan import Bucket
from ringprune.reduction import PhasedSum

__all__ = ["SummingLane"]

Sum = TypeVar("Sum", bound=PhasedSum)


class SummingLane(PackedLane, Generic[Sum]):
    """What lanes have in common that sum entries which not every rank has.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    index_share = 0.5
    """Of the bytes sent, how many are indices'; int32 as they are beside float32."""

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting)
        self._sum: Sum | None = None

    def _sum_up(self, start: Callable[[], Sum]) -> Iterator[UnderWay | None]:
        """[6] The messages of the sum that ``start`` makes."""
        with self._summing():
            self._sum = start()
        while self._sum.unfinished:
            yield self._sum
            with self._summing():
                self._sum.advance()

    @contextmanager
    def _summing(self) -> Iterator[None]:
        metrics, share = self._setting.metrics, self.index_share
        with metrics.stage("reduce"), metrics.sending({"indices": share, "values": 1 - share}, self.bucket.index):
            yield

    def _wait_for_averages(self) -> tuple[Tensor, Tensor]:
        """The indices that the sum has, int32, and their averages, where the bucket's tensors are."""
        assert self._sum is not None, "the bucket's sum was not started"
        with self._summing():
            indices, sums = self._sum.wait()
        self._sum = None
        self._setting.mean.scale(sums, self._setting.comm.size)
        return to_device(indices, self.bucket.device), to_device(sums, self.bucket.device)

    def reduced(self) -> bool:
        """Where no turn is left: whether :meth:`finish` would not wait."""
        return super().reduced() and (self._sum is None or self._sum.done())

    def resumed(self, *, flushed: bool) -> None:
        """The state is that of a checkpoint."""
        super().resumed(flushed=flushed)
        self._sum = None

    def abandon(self) -> None:
        """Wait for the last messages and forget them; the state is as it was before."""
        summed, self._sum = self._sum, None
        if summed is not None:
            with self._summing():
                summed.drain()
        if summed is not None and self._reduction is None:
            self._roll_back()
        else:
            super().abandon()
