"""BatchNorm's running statistics with local steps: each rank's own between exchanges, their mean after one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.metrics import Metrics
from ringprune.reduction import Mean

__all__ = ["NormStatistics"]


class NormStatistics:
    """Floating-point buffers that are averaged at each exchange.

    Args:
        buffers: by name; changed by :meth:`restore`.

    Attributes:
        own: what forward passes of this rank read and write.
        shared: of the last exchange; before it, of the first step.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.own = dict(buffers)
        self.shared = {name: buffer.detach().clone() for name, buffer in buffers.items()}

    @torch.no_grad()
    def adopt(self) -> None:
        """What is shared is what this rank has now, but for statistics that a bad batch has spoilt."""
        for name, own in self.own.items():
            self.shared[name].copy_(self._sound(name, own))

    def average(self, comm: Communicator, metrics: Metrics) -> None:
        """What is shared is the mean over the ranks; all ranks call this.

        A rank whose own are not finite, after a batch that its step was left out for, sends what is shared: theirs
        would stay so on all ranks for good.
        """
        if not self.own:
            return
        sent = [self._sound(name, own) for name, own in self.own.items()]
        dtype = torch.float64 if any(own.dtype == torch.float64 for own in sent) else torch.float32
        flat = torch.cat([own.detach().reshape(-1).to(dtype) for own in sent])
        with metrics.sending("dense"):
            mean = Mean().start(comm, flat, name="statistics").wait()
        parts = torch.split(mean, [own.numel() for own in sent])
        for shared, part in zip(self.shared.values(), parts, strict=True):
            shared.copy_(part.view_as(shared))

    def _sound(self, name: str, own: Tensor) -> Tensor:
        """This rank's own where all of it is finite, without waiting for the device to tell."""
        return torch.where(own.isfinite().all(), own, self.shared[name])

    @torch.no_grad()
    def restore(self) -> None:
        """This rank's own are those shared."""
        for name, own in self.own.items():
            own.copy_(self.shared[name])
