"""A bucket in a hierarchy: gradients are summed inside the node, and the node's first rank exchanges for all of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringprune import packing
from ringprune.comm.communicator import CPU, Handle, Nodes
from ringprune.errors import CommunicatorError
from ringprune.exchange.lane import Lane, Setting, StateOf, UnderWay
from ringprune.plan import Bucket
from ringprune.residual import Correction
from ringprune.wire import ValueCode

__all__ = ["NodeLane"]

T = TypeVar("T")

WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}

FAILED = {torch.float32: 0x7FD25052, torch.float64: 0x7FFA_5052_5052_5052}
"""Bits of the first value where there are no averages: a NaN that no arithmetic makes."""


class NodeLane(Lane):
    """A dense sum inside the node, the policy's own lane between the nodes' first ranks, a broadcast inside the node.

    What a node exchanges is its ranks' sum times nodes / ranks: the average over the nodes is then the average over all
    ranks, however unevenly they are spread, and residuals and velocities are as large as those of one rank.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes; its communicator is that of all ranks.
        nodes: the same, divided by node.
        between: the lane of the same bucket over ``nodes.across``; None on ranks that are not the first of their node.

    Attributes:
        between: see above.
    """

    counts = False

    def __init__(self, bucket: Bucket, setting: Setting, nodes: Nodes, between: Lane | None) -> None:
        super().__init__(bucket, setting, "dense")
        self.between = between
        self._local = nodes.local
        self._share = nodes.count / setting.comm.size
        self._restored = 1.0 if setting.mean.average else 1 / self._share
        self._buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self._handle: Handle | None = None
        self._outputs: Sequence[Tensor] = ()
        self._correction: Correction | None = None

    def _code(self) -> ValueCode | None:
        return None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> None:
        """Loss scale and clipping are the rank's own; momentum is the node's."""
        with self._setting.metrics.stage("pack"):
            packing.flatten(corrected, correction.factors, self._buffer)
        shares = [self._share] * len(correction.factors)
        self._correction = Correction(shares, correction.momentum, correction.nesterov)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        with self._setting.metrics.stage("node"):
            self._handle = self._local.allreduce(self._buffer, name=f"bucket {self.bucket.index} of the node")
        yield self._handle
        self._wait_for_node()
        if self.between is None:
            return
        assert self._correction is not None
        between, correction = self.between, self._correction
        self._between(lambda: between.start(step, self._parts(), correction))
        while self._between(between.advance):
            yield between

    def _between(self, turn: Callable[[], T]) -> T | None:
        """A turn between the nodes; none after one that failed.

        What all first ranks have met in the same turn, as of a message that all of them have, waits until the other
        ranks of the nodes can be told. What this rank may have met alone it raises, since others wait for it.
        """
        if self._setting.failure is None:
            try:
                return turn()
            except CommunicatorError as error:
                if error.alone:
                    raise
                self._setting.failure = error
        return None

    def reduced(self) -> bool:
        """Whether what is under way between the nodes is there."""
        return super().reduced() and (self.between is None or self.between.reduced())

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """On the node's first rank wait for the averages; on all of them start to pass them on."""
        if (between := self.between) is not None:
            self._between(lambda: between.finish(self._parts()))
        self._pass_on(outputs)

    def arrive(self) -> None:
        """Wait for the averages inside the node."""
        self._wait_for_node()

    def check(self) -> None:
        """Raise on all ranks where the nodes could not exchange this bucket, or one before it."""
        if self._setting.failure is not None or FAILED[self._buffer.dtype] in self._mark().tolist():
            raise self._failure()

    def settle(self) -> None:
        """Write the averages."""
        with self._setting.metrics.stage("unpack"):
            packing.unflatten(self._outputs, self._buffer)
        self._outputs = ()

    def look_ahead(self, step: int) -> None:
        """As the lane between the nodes does."""
        if self.between is not None:
            self.between.look_ahead(step)

    def forget(self) -> None:
        """As the lane between the nodes does."""
        if self.between is not None:
            self.between.forget()

    def resumed(self, *, flushed: bool) -> None:
        """As the lane between the nodes."""
        super().resumed(flushed=flushed)
        if self.between is not None:
            self.between.resumed(flushed=flushed)

    def abandon(self) -> None:
        """Wait for the last message and forget it; the state is as it was before."""
        if self.between is not None:
            self._between(self.between.abandon)
        self._tell()

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send what the nodes keep, whole, and write its average."""
        if (between := self.between) is not None:
            self._between(lambda: between.flush(self._parts()))
        if self.bucket.route != "packed" and self._setting.policy.local_steps is None:
            self._tell()
            return  # what rounding drops of gradients stays with the nodes
        self._pass_on(outputs)
        self.arrive()
        self.check()
        self.settle()

    def state(self) -> StateOf:
        """What the node keeps, on its first rank."""
        return {} if self.between is None else self.between.state()

    def _parts(self) -> list[Tensor]:
        """The buffer as the bucket's tensors, each flat."""
        return list(torch.split(self._buffer, self.bucket.numels))

    def _pass_on(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = outputs
        with self._setting.metrics.stage("node"):
            if self.between is not None and self._restored != 1.0:
                self._buffer.mul_(self._restored)
            if self._setting.failure is not None:
                self._mark().fill_(FAILED[self._buffer.dtype])
            self._handle = self._local.broadcast(self._buffer, 0, name=f"bucket {self.bucket.index} averages")

    def _tell(self) -> None:
        """As :meth:`_pass_on` and :meth:`check`, where there are no averages to pass on."""
        failed = torch.tensor([self._setting.failure is not None], dtype=torch.int32, device=CPU)
        with self._setting.metrics.stage("node"):
            failed = self._local.broadcast(failed, 0, name=f"bucket {self.bucket.index} failed").wait()
        if failed.item():
            raise self._failure()

    def _failure(self) -> CommunicatorError:
        return self._setting.failure or CommunicatorError(
            f"bucket {self.bucket.index}: the first rank of this node could not exchange it, or one before it, with "
            "the other nodes; the error there says why"
        )

    def _mark(self) -> Tensor:
        """The bits of the first average, if there is one."""
        return self._buffer[:1].view(WHOLE[self._buffer.dtype])

    def _wait_for_node(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with self._setting.metrics.stage("node"):
                handle.wait()
