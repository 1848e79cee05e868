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

    counts = False

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "dense")
        self._groups = "group" in setting.comm.abilities and setting.policy.reduction != "ring"
        self._buffer: Tensor | None = None
        self._values: Sequence[Tensor] = ()  # one after the other what is summed: the buffer, or the gradients

    def _code(self) -> None:
        return None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> None:
        with self._setting.metrics.stage("pack"):
            if self._in_place(corrected, correction):
                self._values = [tensor.view(-1) for tensor in corrected]
                return
            if self._buffer is None:
                self._buffer = torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self.bucket.device)
            packing.flatten(corrected, correction.factors, self._buffer)
            # What has to be copied may differ between the ranks, what they send may not.
            self._values = torch.split(self._buffer, self.bucket.numels) if self._groups else [self._buffer]

    def _in_place(self, corrected: Sequence[Tensor], correction: Correction) -> bool:
        """Whether the sums can be made where the gradients are."""
        if not correction.in_place or not (len(corrected) == 1 or self._groups):
            return False
        plain = all(factor == 1.0 for factor in correction.factors)
        return plain and all(tensor.dtype == self.bucket.dtype for tensor in corrected)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        if self._groups:
            self._reduce_group(self._values)
        else:
            self._reduce(self._values[0])
        yield from self._rounds()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the averages and write them."""
        _, factor = self._wait_for_sum()
        values, self._values = self._values, ()
        with self._setting.metrics.stage("unpack"):
            if len(values) < len(outputs):
                packing.unflatten(outputs, values[0], factor)
                return
            for output, value in zip(outputs, values, strict=True):
                if output.data_ptr() != value.data_ptr():
                    packing.unflatten([output], value, factor)
                elif factor != 1.0:
                    value.mul_(factor)  # summed where the gradient is

    def abandon(self) -> None:
        """Wait for the last message and forget it."""
        super().abandon()
        self._values = ()
