"""A bucket that travels dense as it is; it keeps nothing between steps."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import packing
from ringprune.exchange.lane import Lane, Setting, UnderWay
from ringprune.plan import Bucket
from ringprune.residual import Correction

__all__ = ["DenseLane"]


class DenseLane(Lane):
    """A plain allreduce of all entries, as Horovod makes it.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "dense")
        self._buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def _code(self) -> None:
        return None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> None:
        with self._setting.metrics.stage("pack"):
            packing.flatten(corrected, correction.factors, self._buffer)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        self._reduce(self._buffer)
        yield from self._rounds()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the averages and write them."""
        values, _ = self._wait()
        with self._setting.metrics.stage("unpack"):
            packing.unflatten(outputs, values)
