"""One bucket's way through the stages: what all ways have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.metrics import Content, Metrics
from ringprune.plan import Bucket
from ringprune.policies.policy import Policy
from ringprune.reduction import Average, Mean
from ringprune.residual import Correction
from ringprune.wire import ValueCode

__all__ = ["Lane", "Setting", "StateOf"]

StateOf = dict[int, dict[str, Tensor]]
"""What must be saved of each member of a bucket, by its position in the Plan: flat views."""


@dataclass(frozen=True)
class Setting:
    """What all lanes of an exchange share.

    Attributes:
        policy: how things are exchanged.
        comm: with whom.
        metrics: counts bytes and seconds.
        weights: the parameters' tensors in the Plan's order, equal on all ranks.
        seed: decides the roots and what is explored; equal on all ranks.
        mean: average or sum.
        velocity: accumulate a velocity (momentum correction).
        spare: keep what taking a step back needs.
    """

    policy: Policy
    comm: Communicator
    metrics: Metrics
    weights: Sequence[Tensor]
    seed: int
    mean: Mean
    velocity: bool
    spare: bool


class Lane(ABC):
    """State of one bucket, and its messages under way.

    A step is :meth:`start`, :meth:`advance` until it returns False, then :meth:`finish` or :meth:`abandon`.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
        content: what its values are counted as.
    """

    def __init__(self, bucket: Bucket, setting: Setting, content: Content) -> None:
        self.bucket, self._setting, self._content = bucket, setting, content
        self._turns: Iterator[None] = iter(())
        self._reduction: Average | None = None

    def start(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """The stages that need no other rank, and the first message; does not wait for another rank.

        Returns:
            How many entries of each tensor are NaN or infinite, int64, where that was learnt on the way.
        """
        found = self._begin(step, corrected, correction)
        self._turns = self._messages(step)
        return found

    def advance(self) -> bool:
        """Wait for the message under way and start the next; False where none is left to start."""
        return next(self._turns, self) is not self

    @abstractmethod
    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """Accumulate, and start the first message."""

    @abstractmethod
    def _messages(self, step: int) -> Iterator[None]:
        """The messages after the first: each turn waits for the one under way, starts the next, and yields."""

    @abstractmethod
    def _code(self) -> ValueCode | None:
        """How float32 values travel; None as they are."""

    @abstractmethod
    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the last message, write the averages into the bucket's tensors, let the step take effect.

        What a lane has written is certain to be there after :meth:`settle`.
        """

    def abandon(self) -> None:
        """The step is not made: wait for the last message and forget it; the state is as it was before."""
        self._under_way().drain()
        self._reduction = None

    def settle(self) -> None:  # noqa: B027 - most lanes have nothing under way then
        """After :meth:`finish` of all lanes: wait for what that has started."""

    def flush(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027 - most lanes keep nothing
        """Send all that is kept back, whole, and write its average into the bucket's tensors."""

    def state(self) -> StateOf:
        """What must be saved."""
        return {}

    def _reduce(self, values: Tensor) -> None:
        """[6] Start the reduction of this step's values."""
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
            code = self._code() if values.dtype == torch.float32 else None
            name = f"bucket {self.bucket.index} {self._content}"
            self._reduction = self._setting.mean.start(self._setting.comm, values, code, name=name)

    def _rounds(self) -> Iterator[None]:
        """The messages of the reduction after its first."""
        while True:
            with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
                more = self._under_way().advance()
            if not more:
                return
            yield

    def _wait(self) -> tuple[Tensor, Tensor | None]:
        """The averages, and what rounding dropped on this rank."""
        reduction, self._reduction = self._under_way(), None
        with self._setting.metrics.stage("reduce"):
            return reduction.wait(), reduction.rest

    def _under_way(self) -> Average:
        assert self._reduction is not None, "the bucket's reduction was not started"
        return self._reduction
