"""A bucket that travels dense as it is; it keeps nothing between steps."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import ops, packing
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
        self._values: Sequence[Tensor] = ()  # one after the other what is summed: the buffer, or the gradients

    def _code(self) -> None:
        return None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        with self._setting.metrics.stage("pack"):
            found = ops.count_nonfinite(corrected)
            if self._in_place(corrected, correction):
                self._values = [tensor.view(-1) for tensor in corrected]
                return found
            if self._buffer is None:
                self._buffer = torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self.bucket.device)
            self._values = [self._buffer]
            packing.flatten(corrected, correction.factors, self._buffer)
            return found

    def _in_place(self, corrected: Sequence[Tensor], correction: Correction) -> bool:
        """Whether the sums can be made where the gradients are."""
        setting, dtype = self._setting, self.bucket.dtype
        if not setting.in_place or not (len(corrected) == 1 or "group" in setting.comm.abilities):
            return False
        return all(factor == 1.0 for factor in correction.factors) and all(t.dtype == dtype for t in corrected)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        if "group" in self._setting.comm.abilities:
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
