"""Buckets that keep something between steps: what is not sent, or what rounding drops, stays in a residual."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import packing, wire
from ringprune.exchange.lane import Lane, Setting, StateOf, UnderWay
from ringprune.metrics import Content
from ringprune.plan import Bucket
from ringprune.reduction import Mean
from ringprune.residual import Correction, Residual

__all__ = ["KeptLane", "RoundedLane"]


class KeptLane(Lane):
    """A lane with a residual.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
        content: what its values are counted as.
        velocity: keep a velocity (momentum correction) besides the residual.
        low_pass: share of a step's change that the residual takes on.

    Attributes:
        residual: residual, velocity and hints.
        sent: how many entries of each tensor have been sent, int64.
        agreed: where entries were sent at the last exchange, equal on every rank; None where all of them were.
    """

    def __init__(
        self, bucket: Bucket, setting: Setting, content: Content, *, velocity: bool, low_pass: float = 1.0
    ) -> None:
        super().__init__(bucket, setting, content)
        self.residual = Residual(
            bucket.offsets, velocity=velocity, spare=setting.spare, device=bucket.device, low_pass=low_pass
        )
        self.sent = torch.zeros(len(bucket.members), dtype=torch.int64, device=bucket.device)
        self._ends = torch.tensor(bucket.offsets, dtype=torch.int32, device=bucket.device)
        self._indices: Tensor | None = None
        self.agreed: Tensor | None = None
        policy = setting.policy
        self._value_code = wire.value_code(policy.values if content == "values" else policy.dense_values)

    def _code(self) -> wire.ValueCode | None:
        return self._value_code

    def _count(self, indices: Tensor | None) -> None:
        """Count what is sent, of each tensor; None is all entries."""
        numel = self.bucket.numel
        if self._content == "values":
            self._setting.metrics.selected(numel if indices is None else indices.numel(), numel)
        self.sent += (self._ends if indices is None else torch.searchsorted(indices, self._ends)).diff()

    def _reduce_taken(self, values: Tensor) -> None:
        """[6] Start the reduction of what was taken; all of it is in the residual yet, where its rest stays."""
        self._reduce(values, self.residual.next_residual if self._indices is None else None)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the averages and write them; keep what rounding dropped; the new state takes effect.

        Where a message is found damaged, averages of the parts before it have been written.
        """
        if self._indices is None and self.residual.expected is None:
            offsets = self.bucket.offsets
            rest = self._wait_in_parts(lambda *part: packing.unflatten_part(outputs, offsets, *part))
        else:
            values, rest = self._wait()
            with self._setting.metrics.stage("unpack"):
                self._unpack(outputs, self._indices, values)
        with self._setting.metrics.stage("unpack"):
            self.residual.give_back(self._indices, rest)
            self.agreed = self._indices
            self._complete(outputs)

    def _unpack(self, outputs: Sequence[Tensor], indices: Tensor | None, values: Tensor) -> None:
        """[7] Write the averages at the index set; None is everywhere, which comes here only where much is expected."""
        assert indices is not None, "averages of all entries are written part by part"
        packing.unpack(outputs, indices, values)

    def _complete(self, outputs: Sequence[Tensor]) -> None:
        """The averages are written; the new state takes effect."""
        self._commit()

    def _commit(self) -> None:
        self.residual.commit()

    def _roll_back(self) -> None:
        """The state is what it was before the step."""
        self.residual.rollback()

    def abandon(self) -> None:
        """Wait for the last message and forget it; the state is as it was before."""
        super().abandon()
        self._roll_back()

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send residual and velocity whole; the residual is zero afterwards, the velocity its mean."""
        state, comm, metrics, index = self.residual, self._setting.comm, self._setting.metrics, self.bucket.index
        with metrics.sending("dense", index):
            values = state.residual.clone()
            state.residual.zero_()
            residual = self._setting.mean.start(comm, values, name=f"bucket {index} dense")
            velocity = None
            if state.velocity is not None:
                velocity = Mean().start(comm, state.velocity, name=f"bucket {index} velocity")
        packing.unflatten(outputs, residual.wait())
        if velocity is not None:
            velocity.wait()

    def average_velocity(self) -> None:
        """Make the velocity, where there is one, its mean over the ranks."""
        if self.residual.velocity is not None:
            with self._setting.metrics.sending("dense", self.bucket.index):
                name = f"bucket {self.bucket.index} velocity"
                Mean().start(self._setting.comm, self.residual.velocity, name=name).wait()

    def state(self) -> StateOf:
        """Residual and velocity, flat."""
        state: StateOf = {}
        for place, member in enumerate(self.bucket.members):
            part = slice(*self.bucket.offsets[place : place + 2])
            state[member] = {"residual": self.residual.residual[part]}
            if self.residual.velocity is not None:
                state[member]["velocity"] = self.residual.velocity[part]
        return state


class RoundedLane(KeptLane):
    """A bucket that travels dense in fewer bits: all of it at each step, and what rounding drops with the next.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "dense", velocity=False)

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        with self._setting.metrics.stage("accumulate"):
            return self.residual.accumulate(corrected, correction)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        with self._setting.metrics.stage("pack"):
            self._count(None)
            values = self.residual.take_all()
        self._reduce_taken(values)
        yield from self._rounds()

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Make the residuals one mean on all ranks: no gradient is held back but the last one's rounding.

        It is sent with the next step. As a step of its own it would go past the momentum that its gradient had. With
        local steps it is what weights have moved by, momentum and all, and is sent like any other residual.
        """
        if self._setting.policy.local_steps is not None:
            super().flush(outputs)
            return
        with self._setting.metrics.sending("dense", self.bucket.index):
            average = Mean().start(self._setting.comm, self.residual.residual, name=f"bucket {self.bucket.index} rest")
        average.wait()
