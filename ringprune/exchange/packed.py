"""A bucket that travels packed: values at one index set, which roots propose and all ranks share."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringprune import agreement, importance, packing, selection, wire
from ringprune.exchange.kept import KeptLane
from ringprune.exchange.lane import Setting, StateOf
from ringprune.plan import Bucket
from ringprune.residual import Correction, Selecting
from ringprune.routing import sent_whole

__all__ = ["PackedLane"]


class PackedLane(KeptLane):
    """Stages 1 to 7 of a bucket whose ranks agree on one index set.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "values", velocity=setting.velocity)
        self._rms = self._next_rms = torch.zeros(len(bucket.members), dtype=torch.float64)
        self._proposals: agreement.Proposals | None = None
        self._explored: Tensor | None = None
        self._index_code = wire.index_code(0, bucket.numel)
        self._roots = setting.policy.roots.number(setting.comm.size)

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        metrics = self._setting.metrics
        with metrics.stage("accumulate"):
            self._next_rms = self._rms
            if step % importance.RMS_REFRESH == 0:
                self._next_rms = importance.root_mean_square(self._weights())
        self._proposals = self._explored = None
        counts = [] if sent_whole(metrics.density) else self._shares(step)
        if any(counts):
            return self._propose(step, corrected, correction, counts)
        with metrics.stage("accumulate"):
            return self.residual.accumulate(corrected, correction)

    def _shares(self, step: int) -> list[int]:
        """Entries that each root proposes of each tensor; what is explored is drawn here, the same on every rank."""
        bucket, policy = self.bucket, self._setting.policy
        budget = selection.budgets(bucket.numels, self._setting.metrics.density)
        drawn, counts = selection.shares(budget, policy.explore, self._roots)
        if any(drawn):
            self._explored = selection.explore(drawn, bucket.offsets, self._setting.seed, step, bucket.index)
        return counts

    def _propose(self, step: int, corrected: Sequence[Tensor], correction: Correction, counts: list[int]) -> Tensor:
        """Stages 1 to 4: select and send, where this rank is a root of the bucket; accumulate and receive elsewhere."""
        bucket, metrics, policy, comm = self.bucket, self._setting.metrics, self._setting.policy, self._setting.comm
        roots = policy.roots.of(self._setting.seed, step, bucket.index, comm.size)
        self._index_code = wire.index_code(sum(counts), bucket.numel, policy.index_format)
        if comm.rank in roots:
            with metrics.stage("select"):
                selecting = Selecting(policy.score.name, policy.score.parameters(self._next_rms), counts)
                positions, nonfinite = self.residual.accumulate_select(
                    corrected, correction, self._weights(), selecting
                )
            with metrics.stage("agree"):
                message = self._index_code.encode(positions)
        else:
            with metrics.stage("accumulate"):
                nonfinite = self.residual.accumulate(corrected, correction)
                message = torch.empty(self._index_code.size, dtype=torch.uint8, device=bucket.device)
        with metrics.stage("agree"), metrics.sending("indices", bucket.index):
            name = f"bucket {bucket.index} indices"
            self._proposals = agreement.Proposals(comm, roots, message, name=name)
        return nonfinite

    def _messages(self, step: int) -> Iterator[None]:
        metrics = self._setting.metrics
        with metrics.stage("agree"):
            self._indices = self._agreed(step)
        with metrics.stage("pack"):
            values = self._pack()
        self._reduce(values)
        yield
        yield from self._rounds()

    def _agreed(self, step: int) -> Tensor | None:
        """[4] The index set of this step; None where the bucket is sent whole."""
        if sent_whole(self._setting.metrics.density):
            return None
        sets = []
        for root, message in self._proposals.wait() if self._proposals is not None else ():
            name = f"bucket {self.bucket.index} indices from rank {root} at step {step}"
            sets.append(self._index_code.decode(message, name=name))
        if self._explored is not None:
            sets.append(self._explored.to(self.bucket.device))
        return agreement.union(sets)

    def _pack(self) -> Tensor:
        """[5] Values leave the residual."""
        state, indices = self.residual, self._indices
        self._count(indices)
        if indices is None:
            return packing.pack_whole(state.next_residual)
        masked = state.next_velocity if self._setting.policy.mask_velocity else None
        return packing.pack(state.next_residual, masked, indices, self.bucket.offsets)

    def _commit(self) -> None:
        super()._commit()
        self._rms = self._next_rms

    def state(self) -> StateOf:
        """Residual, velocity and root mean squares."""
        state = super().state()
        for place, member in enumerate(self.bucket.members):
            state[member]["rms"] = self._rms[place]
        return state

    def _weights(self) -> list[Tensor]:
        return [self._setting.weights[i].detach().contiguous() for i in self.bucket.members]
