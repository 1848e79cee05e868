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
        self._buffer: Tensor | None = None
        self._values = torch.empty(0)

    def _code(self) -> None:
        return None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> None:
        if self._in_place(corrected, correction):
            self._values = corrected[0].view(-1)
            return
        if self._buffer is None:
            self._buffer = torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self.bucket.device)
        self._values = self._buffer
        with self._setting.metrics.stage("pack"):
            packing.flatten(corrected, correction.factors, self._buffer)

    def _in_place(self, corrected: Sequence[Tensor], correction: Correction) -> bool:
        """Whether the sum can be made where the gradient is."""
        alone = self._setting.in_place and len(corrected) == 1
        return alone and correction.factors[0] == 1.0 and corrected[0].dtype == self.bucket.dtype

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        self._reduce(self._values)
        yield from self._rounds()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the averages and write them."""
        values, factor = self._wait_for_sum()
        self._values = torch.empty(0)
        with self._setting.metrics.stage("unpack"):
            if len(outputs) == 1 and outputs[0].data_ptr() == values.data_ptr():
                values.mul_(factor)  # summed where the gradient is
            else:
                packing.unflatten(outputs, values, factor)
