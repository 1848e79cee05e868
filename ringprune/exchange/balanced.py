"""A bucket of which every rank proposes entries with their values, and the largest sums of all are kept."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ringprune import ops, packing, selection, wire
from ringprune.devices import to_device
from ringprune.exchange.lane import Setting, UnderWay
from ringprune.exchange.summing import SummingLane
from ringprune.importance import Magnitude
from ringprune.plan import Bucket
from ringprune.reduction import BalancedReduction, Dealing, among, dealing

__all__ = ["BalancedLane"]


class BalancedLane(SummingLane[BalancedReduction]):
    """Stages 1 to 7 of a bucket whose index set is found by summing: agreement and reduction are one.

    What a rank proposes stays in its residual until it is known to be kept.

    Args:
        bucket: the tensors.
        setting: what it shares with the other lanes.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting)
        self.passes_next = setting.policy.values == "fp32"  # else rests of sums are added
        self._own = torch.empty(0, dtype=torch.int32, device="cpu")

    def _shares(self, step: int, density: float) -> list[int]:
        """Entries that each rank proposes of each tensor; as many are kept of all tensors together."""
        return self._budgets(density)

    def _is_root(self, step: int) -> bool:
        """Every rank proposes."""
        return any(self._counts)

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        metrics = self._setting.metrics
        self._indices = None
        if self._positions is None:
            with metrics.stage("pack"):
                values = self._pack()
            self._reduce_taken(values)
            yield from self._rounds()
            return
        with metrics.stage("pack"):
            self._own = selection.unpadded(self._positions)
            values = ops.gather(self.residual.next_residual, self._own)
        dealt, code = self._deal(step)
        self.index_share = code.index_share
        yield from self._sum_up(lambda: self._summed(values, dealt, code))

    def _summed(self, values: Tensor, dealt: Dealing, code: wire.PairCode) -> BalancedReduction:
        comm, own, name = self._setting.comm, self._own.cpu(), f"bucket {self.bucket.index} largest"
        return BalancedReduction(comm, own, values.cpu(), dealing=dealt, judge=self._judge, code=code, name=name)

    def _deal(self, step: int) -> tuple[Dealing, wire.PairCode]:
        """Who adds what, and how it travels. Where few ranks add, others do at the next step and in the next bucket."""
        policy, bucket = self._setting.policy, self.bucket
        dealt = dealing(bucket.numel, sum(self._counts), self._setting.comm.size, turn=step + bucket.index)
        return dealt, wire.pair_code(dealt.expected, dealt.groups, policy.index_format, policy.values)

    def _judge(self, indices: Tensor, sums: Tensor, count: int) -> Tensor:
        """[2] and [3] The places of the sums that score highest, by the same score as what was proposed."""
        score = self._selecting()
        if score.score == Magnitude.name:
            scores = sums.abs()
        else:
            scores = ops.importance(sums, self._weights_at(indices), score=score.score, parameters=score.parameters)
        return selection.unpadded(ops.select(scores, [0, sums.numel()], [min(count, sums.numel())]))

    def _weights_at(self, indices: Tensor) -> list[Tensor]:
        """Each tensor's weights at those of ``indices`` that lie in it, in CPU memory."""
        offsets = torch.tensor(self.bucket.offsets, dtype=torch.int32, device="cpu")
        borders = torch.searchsorted(indices, offsets).tolist()
        places = to_device(indices, self.bucket.device).long()
        return [
            weight.reshape(-1)[places[a:b] - start].cpu()
            for weight, (a, b), start in zip(self._weights(), pairwise(borders), self.bucket.offsets, strict=False)
        ]

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the largest sums and write their averages; what was kept leaves the residual; it takes effect."""
        if self._sum is None:
            super().finish(outputs)
            return
        summed = self._sum
        indices, averages = self._wait_for_averages()
        with self._setting.metrics.stage("unpack"):
            packing.unpack(outputs, indices, averages)
            self._clear(indices, summed)
            self._count(indices)
            self.agreed = indices
            self._complete(outputs)

    def _clear(self, kept: Tensor, summed: BalancedReduction) -> None:
        """[5] What this rank sent of the entries kept leaves its residual, but for what rounding dropped."""
        policy, state, device = self._setting.policy, self.residual, self.bucket.device
        sent = _among(self._own, kept)
        indices = self._own[sent]
        if self.passes_next and state.waits and ops.may_wait(indices, self.bucket.numel):
            state.leave(ops.Sent(indices, None, policy.mask_velocity and state.next_velocity is not None))
        else:
            self._take(indices)
        if policy.values != "fp32":
            state.give_back(indices, to_device(summed.rest, device)[sent])
            state.next_residual.index_add_(
                0, to_device(summed.own_indices, device).long(), to_device(summed.own_rest, device)
            )


def _among(own: Tensor, kept: Tensor) -> Tensor:
    """Which of ``own`` are in ``kept``; both ascend."""
    if own.device.type == "cpu":
        return torch.from_numpy(among(own.numpy(), kept.numpy()))
    places = torch.searchsorted(kept, own).clamp_(max=max(0, kept.numel() - 1))
    return kept[places] == own if kept.numel() else torch.zeros_like(places, dtype=torch.bool)
