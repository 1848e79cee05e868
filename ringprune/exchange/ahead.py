"""A packed bucket whose index set is chosen one step ahead, and travels while the next forward pass runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.exchange.lane import Setting, StateOf
from ringprune.exchange.packed import PackedLane
from ringprune.plan import Bucket
from ringprune.residual import Correction
from ringprune.routing import sent_whole

__all__ = ["AheadLane"]


class AheadLane(PackedLane):
    """Stages 1 to 7 with agreement off the critical path: a step's set is chosen by what the steps before left over.

    So the gradient of the step has no part in the choice. When the bucket is full its index set is there: it is packed
    at once, and its reduction starts.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    eager = True
    passes_next = False  # the next step's set is chosen first

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting)
        self._chosen_for: int | None = None
        # No exchange since the start or a flush: the residual has nothing to choose by. A tensor, for checkpoints.
        self._empty = torch.ones(1, dtype=torch.uint8, device="cpu")

    def look_ahead(self, step: int) -> None:
        """Stages 2 to 4 of ``step`` on the residual and the weights as they are, which are those of the step before."""
        self._empty.zero_()
        if self._chosen_for is not None:
            self.forget()  # for a second step on the same averages
        if self._had_sent_all(step):
            return
        self._choose(step)
        self._chosen_for = step
        self._send(step)

    def _had_sent_all(self, step: int) -> bool:
        """Whether the exchange before ``step`` has left nothing over to choose by; the same on all ranks."""
        return step > 0 and sent_whole(self._setting.policy.density.at(step - 1))

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send residual and velocity whole."""
        super().flush(outputs)
        self._empty.fill_(1)

    def resumed(self, *, flushed: bool) -> None:
        """The state is that of a checkpoint."""
        super().resumed(flushed=flushed)
        if flushed:
            self._empty.fill_(1)

    def state(self) -> StateOf:
        """As every packed lane, and whether there is nothing to choose by."""
        state = super().state()
        for member in self.bucket.members:
            state[member]["empty"] = self._empty
        return state

    def _choose(self, step: int) -> None:
        """Stages 2 and 3 on what the steps before have left over."""
        self._prepare(step)
        if self._is_root(step):
            with self._setting.metrics.stage("select"):
                if self._setting.policy.selection == "sampled":
                    self._positions = self._sampled(step, self.residual.residual)
                else:
                    self._positions = self.residual.select(self._weights(), self._selecting(), self.bucket.offsets)

    def forget(self) -> None:
        """The state changes otherwise than by a step: what was chosen ahead is chosen again when it is needed."""
        if self._chosen_for is not None and self._proposals is not None:
            self._proposals.wait()
        self._chosen_for = None
        super().forget()

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        if self._chosen_for != step:
            # At the start, after a checkpoint and after a step that was not made. Where steps may have left something
            # over it is chosen as look_ahead() would have, also from a residual that happens to hold nothing.
            if self._empty or self._had_sent_all(step):
                return super()._begin(step, corrected, correction)
            self._choose(step)
        self._chosen_for = None
        with self._setting.metrics.stage("accumulate"):
            return self.residual.accumulate(corrected, correction)
