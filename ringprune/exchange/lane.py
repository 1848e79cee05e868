"""One bucket's way through the stages: what all ways have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.errors import CommunicatorError, UsageError
from ringprune.exchange.damage import Damage
from ringprune.exchange.rotation import Rotation
from ringprune.guard import Guard
from ringprune.metrics import Content, Metrics
from ringprune.plan import Bucket
from ringprune.policies.policy import Policy
from ringprune.reduction import Average, Mean, RingChoice
from ringprune.residual import Correction
from ringprune.wire import ValueCode

__all__ = ["Lane", "Setting", "StateOf", "UnderWay"]

StateOf = dict[int, dict[str, Tensor]]
"""What must be saved of each member of a bucket, by its position in the Plan: flat views."""


class UnderWay(Protocol):
    """What a turn may wait for."""

    def done(self) -> bool:
        """Whether it would not have to."""
        ...


@dataclass
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
        ring: which sums of float32 values our ring makes; known from the first step on.
        guard: what looks after packed tensors; None if nothing does.
        rotation: whose turn it is, where packed tensors take turns.
        whole: send all entries, and as they are, so that nothing is kept back.
        first: the step at which this exchange began, where another one had gone before.
        failure: in a hierarchy, what went wrong between the nodes: nothing more is exchanged.
        damage: what was broken off.
        besides: what else has to be equal on all ranks before the first step; asked for then.
    """

    policy: Policy
    comm: Communicator
    metrics: Metrics
    weights: Sequence[Tensor]
    seed: int
    mean: Mean
    velocity: bool
    spare: bool
    ring: RingChoice = field(default_factory=RingChoice.never)
    guard: Guard | None = None
    rotation: Rotation | None = None
    whole: bool = False
    first: int = 0
    failure: CommunicatorError | None = None
    damage: Damage = field(default_factory=Damage)
    besides: Callable[[], Sequence[Tensor]] = tuple

    def sums_by_ring(self, values: Tensor) -> bool:
        """Whether ``values`` are summed by our ring."""
        return values.dtype == torch.float32 and self.ring.takes(values.nbytes)


class Lane(ABC):
    """State of one bucket, and its messages under way.

    A step is :meth:`start`, turns by :meth:`advance` until it returns False, then :meth:`finish` or :meth:`abandon`.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
        content: what its values are counted as.

    Attributes:
        eager: what its second turn waits for was sent long ago, so it gets that turn at once.
        over: no turn is left.
        counts: learns on the way how many entries are NaN or infinite.
    """

    eager, counts = False, True
    over = True

    def __init__(self, bucket: Bucket, setting: Setting, content: Content) -> None:
        self.bucket, self._setting, self._content = bucket, setting, content
        self._turns: Iterator[UnderWay | None] = iter(())
        self._waiting: UnderWay | None = None
        self._reduction: Average | None = None

    def start(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """The stages that need no other rank; nothing is sent.

        Returns:
            How many entries of each tensor are NaN or infinite, int64; None from a lane that does not learn it.
        """
        found = self._begin(step, corrected, correction)
        self._turns, self._waiting, self.over = self._messages(step), None, False
        return found

    def done(self) -> bool:
        """Whether the next turn needs no waiting."""
        return self._waiting is None or self._waiting.done()

    def advance(self) -> bool:
        """One turn: wait for the message under way, start the next; False where no turn is left after it."""
        self._waiting = next(self._turns, None)
        self.over = self._waiting is None
        return not self.over

    def reduced(self) -> bool:
        """Where no turn is left: whether :meth:`finish` would not wait."""
        return self._reduction is None or self._reduction.done()

    @abstractmethod
    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """Accumulate, and what else can be done alone."""

    @abstractmethod
    def _messages(self, step: int) -> Iterator["UnderWay | None"]:
        """The turns: each waits for the message before it, starts the next and yields what the next turn waits for."""

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
        with self._setting.metrics.sending(self._content, self.bucket.index):
            self._under_way().drain()
        self._reduction = None

    def look_ahead(self, step: int) -> None:  # noqa: B027 - most lanes do not
        """Begin with what can be done of ``step`` before its gradients are there."""

    def forget(self) -> None:  # noqa: B027 - most lanes have begun nothing
        """Forget what was begun ahead; on all ranks."""

    def resumed(self, *, flushed: bool) -> None:
        """The state is that of a checkpoint; ``flushed``: of no step yet, or all was sent after the last one.

        What was under way in an exchange that was broken off is forgotten, and not waited for: maybe it never comes.
        """
        self._turns, self._waiting, self._reduction, self.over = iter(()), None, None, True

    def arrive(self) -> None:  # noqa: B027 - most lanes have nothing under way then
        """After :meth:`finish` of all lanes: wait for what that has started."""

    def check(self) -> None:  # noqa: B027 - most lanes have raised before
        """After :meth:`arrive`, of the last lane: raise what has gone wrong in any of them."""

    def settle(self) -> None:  # noqa: B027 - most lanes have written them
        """Write the averages that have arrived."""

    def flush(self, outputs: Sequence[Tensor]) -> None:  # noqa: B027 - most lanes keep nothing
        """Send all that is kept back, whole, and write its average into the bucket's tensors."""

    def state(self) -> StateOf:
        """What must be saved."""
        return {}

    def _reduce(self, values: Tensor, room: Tensor | None = None) -> None:
        """[6] Start the reduction of this step's values; ``room`` may be used for what rounding drops of them."""
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
            code = self._code() if values.dtype == torch.float32 and not self._setting.whole else None
            name = f"bucket {self.bucket.index} {self._content}"
            # Coded values are rounded twice by two collectives, by the ring at each hop: so only where it is asked for.
            ring = self._setting.sums_by_ring(values) and (code is None or self._setting.policy.reduction == "ring")
            self._reduction = self._setting.mean.start(
                self._setting.comm, values, code, ring=ring, room=room, name=name
            )

    def _reduce_group(self, tensors: Sequence[Tensor]) -> None:
        """[6] Start the reduction of this step's tensors, each where it is."""
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
            name = f"bucket {self.bucket.index} {self._content}"
            self._reduction = self._setting.mean.start_group(self._setting.comm, tensors, name=name)

    def _rounds(self) -> Iterator["UnderWay | None"]:
        """The messages of the reduction after its first."""
        while self._under_way().unfinished:
            yield self._under_way()
            with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
                self._under_way().advance()

    def _wait(self) -> tuple[Tensor, Tensor | None]:
        """The averages, and what rounding dropped on this rank."""
        reduction, self._reduction = self._under_way(), None
        # Our ring sends while it is waited for.
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
            return reduction.wait(), reduction.rest

    def _wait_for_sum(self) -> tuple[Tensor, float]:
        """The sum, and the factor that makes averages of it; of values without a code."""
        reduction, self._reduction = self._under_way(), None
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(self._content, self.bucket.index):
            return reduction.wait_for_sum()

    def _wait_in_parts(self, write: Callable[[int, Tensor, float], None]) -> Tensor | None:
        """The sum in parts, each handed to ``write``: where it begins, its values, and what makes averages of them.

        Returns:
            What rounding dropped on this rank.
        """
        reduction, self._reduction = self._under_way(), None
        parts, factor = reduction.parts_of_sum()
        metrics = self._setting.metrics
        while True:
            with metrics.stage("reduce"), metrics.sending(self._content, self.bucket.index):
                part = next(parts, None)
            if part is None:
                return reduction.rest
            with metrics.stage("unpack"):
                write(*part, factor)

    def _under_way(self) -> Average:
        if self._reduction is None:
            raise UsageError(
                "an exchange was broken off by an error or a signal, and the rest of it cannot be made: start the "
                "program again from the last checkpoint, on all ranks"
            )
        return self._reduction
