"""Runs the lanes of all buckets in one order on every rank, and makes a step of all or of none."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm.communicator import Communicator, Nodes
from ringprune.exchange.dense import DenseLane
from ringprune.exchange.kept import KeptLane, RoundedLane
from ringprune.exchange.lane import Lane, Setting
from ringprune.exchange.node import NodeLane
from ringprune.exchange.own import OwnLane
from ringprune.exchange.packed import PackedLane
from ringprune.exchange.start_check import check_start
from ringprune.metrics import CONTENTS, Content, Metrics
from ringprune.plan import Bucket, Plan
from ringprune.policies.policy import Policy
from ringprune.reduction import Mean
from ringprune.residual import Correction

__all__ = ["Exchange"]


class Exchange:
    """Exchanges gradients, or whatever is accumulated, under one policy.

    A step is :meth:`begin`, :meth:`start` for each bucket in the Plan's order, :meth:`reduce`, then either
    :meth:`finish` or :meth:`abandon`.

    Args:
        plan: what is exchanged.
        policy: how.
        comm: with whom.
        metrics: counts bytes and seconds.
        weights: the parameters' tensors in the Plan's order, equal on all ranks.
        seed: decides the roots and what is explored; equal on all ranks.
        mean: average or sum.
        velocity: accumulate a velocity (momentum correction).
        spare: keep what :meth:`abandon` needs; False for callers who only start steps that will be made.
        nodes: ``comm`` divided by node, where the exchange is one between nodes; None where it is one between ranks.

    Attributes:
        step: exchanges made; the counter behind roots, exploration and warm-up.
    """

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        comm: Communicator,
        metrics: Metrics,
        weights: Sequence[Tensor],
        *,
        seed: int,
        mean: Mean,
        velocity: bool,
        spare: bool,
        nodes: Nodes | None = None,
    ) -> None:
        self.step = 0
        self._plan, self._checked = plan, False
        self._setting = Setting(policy, comm, metrics, weights, seed, mean, velocity, spare)
        self._keeps = [issubclass(_kind(bucket, policy), KeptLane) for bucket in plan.buckets]
        self._lanes = [_lane(bucket, self._setting, nodes) for bucket in plan.buckets]

    def begin(self) -> None:
        """Open a step; the first one also checks that all ranks start from the same weights and step.

        Raises:
            RankMismatchError: they do not; on all ranks, naming the first parameter that differs.
        """
        setting = self._setting
        density = setting.policy.density
        setting.metrics.begin(density.at(self.step), steady=density.steady(self.step))
        if not self._checked:
            check_start(self.step, setting.weights, self._plan, setting.comm, setting.metrics)
            self._checked = True

    def start(self, index: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """Start bucket ``index``, and take those before it one message further.

        So the buckets form a pipeline: while one is being selected from, the one before it is packed and the one
        before that is being reduced.

        Args:
            index: position of the bucket in the Plan; buckets are started in that order on every rank.
            corrected: what to accumulate: contiguous tensors, one per member, read before this returns.
            correction: their factors and momentum.

        Returns:
            How many entries of each tensor are NaN or infinite, int64, where the bucket learns that on the way.
        """
        found = self._lanes[index].start(self.step, corrected, correction)
        for lane in self._lanes[:index]:
            lane.advance()
        return found

    def reduce(self) -> None:
        """Start all messages that are left. All buckets have been started."""
        under_way: list[Lane] = self._lanes
        while under_way:
            under_way = [lane for lane in under_way if lane.advance()]

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the reductions, write the averages, and let the step take effect.

        Args:
            outputs: one contiguous tensor per parameter of the Plan; all of it is overwritten.
        """
        for lane in self._lanes:
            lane.finish([outputs[i] for i in lane.bucket.members])
        for lane in self._lanes:
            lane.settle()
        self.step += 1
        self._setting.metrics.exchanged()

    def abandon(self) -> None:
        """The step is not made: wait for what is under way and forget it; residual and velocity are as before."""
        for lane in self._lanes:
            lane.abandon()
        self._setting.metrics.exchanged()

    # -- between steps ------------------------------------------------------------------------------------------------

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send all residuals, whole; afterwards nothing is private to a rank. Velocities become their mean.

        Args:
            outputs: one contiguous tensor per parameter; those of buckets with a residual are overwritten with the
                average.
        """
        for lane, keeps in zip(self._lanes, self._keeps, strict=True):
            if keeps:
                lane.flush([outputs[i] for i in lane.bucket.members])

    def keeps(self) -> list[bool]:
        """For each parameter, whether something of it may be kept back."""
        buckets = zip(self._plan.buckets, self._keeps, strict=True)
        keeping = {i for bucket, keeps in buckets if keeps for i in bucket.members}
        return [i in keeping for i in range(len(self._plan.params))]

    def tally(self) -> dict[str, int]:
        """How selection went on this rank: see :class:`ringprune.ops.Hints`."""
        total = dict.fromkeys(ops.TALLY, 0)
        for lane in map(_exchanging, self._lanes):
            if isinstance(lane, PackedLane):
                total = {name: total[name] + count for name, count in lane.residual.hints.counts().items()}
        return total

    def bytes_by_parameter(self) -> dict[str, dict[Content, float]]:
        """Bytes sent of each parameter, by content; they add up to those of all.

        A bucket's bytes are divided by the entries that were sent of its tensors, headers evenly.
        """
        metrics, params = self._setting.metrics, self._plan.params
        shares: dict[str, dict[Content, float]] = {spec.name: dict.fromkeys(CONTENTS, 0.0) for spec in params}
        for lane in map(_exchanging, self._lanes):
            sent = lane.sent.tolist() if isinstance(lane, KeptLane) else lane.bucket.numels
            for member, part in zip(lane.bucket.members, sent, strict=True):
                for content, total in metrics.of_bucket(lane.bucket.index).items():
                    shares[params[member].name][content] = total * part / max(1, sum(sent))
        for share in shares.values():
            share["headers"] = metrics.headers / len(params)
        return shares

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved of each parameter that keeps something, as views by name: residual, velocity, rms."""
        state: dict[str, dict[str, Tensor]] = {}
        for lane in self._lanes:
            for member, entry in lane.state().items():
                spec = self._plan.params[member]
                state[spec.name] = {kind: t if kind == "rms" else t.view(spec.shape) for kind, t in entry.items()}
        return state

    def resumed(self, step: int) -> None:
        """The state was overwritten from a checkpoint made after ``step`` exchanges; check again before going on."""
        self.step = step
        self._checked = False


def _kind(bucket: Bucket, policy: Policy) -> type[PackedLane | RoundedLane | DenseLane]:
    """The way that a bucket takes."""
    if bucket.route == "packed":
        return PackedLane if policy.index_sets == "shared" else OwnLane
    return RoundedLane if policy.dense_values != "fp32" and bucket.dtype == torch.float32 else DenseLane


def _lane(bucket: Bucket, setting: Setting, nodes: Nodes | None) -> Lane:
    kind = _kind(bucket, setting.policy)
    if nodes is None:
        return kind(bucket, setting)
    between = None if nodes.across is None else kind(bucket, replace(setting, comm=nodes.across))
    return NodeLane(bucket, setting, nodes, between)


def _exchanging(lane: Lane) -> Lane:
    """The lane that exchanges with other ranks under the policy; itself where this rank leaves that to another."""
    return lane.between or lane if isinstance(lane, NodeLane) else lane
