"""One exchange: the seven stages in order, bucket by bucket; the only file that knows the order.

::

   backward hook of one parameter  (buckets fill in reverse order of the forward pass)
        |
        v
   [1] accumulate   residual += corrected gradient             local   residual.py
   [2] score        importance(residual, weight)               local   importance.py     only on this step's roots
   [3] select       scores -> proposed indices                 local   selection.py      only on this step's roots
   [4] agree        proposals -> one index set on every rank   comm    agreement.py
   [5] pack         take values at the indices, clear them     local   packing.py
   [6] reduce       sum the packed values over the ranks       comm    reduction/
   [7] unpack       write the average into param.grad          local   packing.py
        |
        v
   optimizer.step()

On the roots [1] to [3] are one pass over memory (``ops.accumulate_select``); the other ranks only accumulate.
What enters [1] and where [7] writes is given by the caller: gradients and ``param.grad`` in gradient mode.
Collectives are started in the order of the Plan's buckets on every rank: first every bucket's proposals (and dense
buckets' reductions), as backward fills them, then every packed bucket's reduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringprune import agreement, importance, ops, packing, selection, wire
from ringprune.comm.communicator import Communicator
from ringprune.errors import RankMismatchError
from ringprune.metrics import Content, Metrics
from ringprune.plan import Bucket, Plan
from ringprune.policies.policy import Policy
from ringprune.reduction import Mean, Reduction
from ringprune.residual import Correction, Residual, Selecting
from ringprune.routing import sent_whole

__all__ = ["Exchange"]


@dataclass
class _Packed:
    """State and messages under way of a bucket that travels packed."""

    bucket: Bucket
    residual: Residual
    rms: Tensor
    next_rms: Tensor
    budget: list[int] = field(default_factory=list)
    proposals: agreement.Proposals | None = None
    explored: Tensor | None = None
    indices: Tensor | None = None
    reduction: Reduction | None = None


@dataclass
class _Dense:
    """Buffer and message under way of a bucket that travels dense; it keeps nothing between steps."""

    bucket: Bucket
    buffer: Tensor
    reduction: Reduction | None = None


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
    ) -> None:
        self.step = 0
        self._plan, self._policy, self._comm, self._metrics = plan, policy, comm, metrics
        self._weights, self._seed, self._mean = weights, seed, mean
        self._roots = policy.roots.number(comm.size) if plan.packed_numel else 1
        self._checked = False
        self._lanes: list[_Packed | _Dense] = [
            self._packed(bucket, velocity, spare)
            if bucket.route == "packed"
            else _Dense(bucket, torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device))
            for bucket in plan.buckets
        ]

    @staticmethod
    def _packed(bucket: Bucket, velocity: bool, spare: bool) -> _Packed:
        tensors = len(bucket.members)
        residual = Residual(tensors, bucket.numel, velocity=velocity, spare=spare, device=bucket.device)
        rms = torch.zeros(tensors, dtype=torch.float64)
        return _Packed(bucket, residual, rms, rms)

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a step; the first one also checks that all ranks start from the same weights and step.

        Raises:
            RankMismatchError: they do not; on all ranks, naming the first parameter that differs.
        """
        density = self._policy.density
        self._metrics.begin(density.at(self.step), steady=density.steady(self.step))
        if not self._checked:
            self._check_start()
            self._checked = True

    def start(self, index: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor | None:
        """Stages 1 to 4 of bucket ``index``, as far as they need no other rank; returns at once.

        Args:
            index: position of the bucket in the Plan; buckets are started in that order on every rank.
            corrected: what to accumulate: contiguous tensors, one per member, read before this returns.
            correction: their factors and momentum.

        Returns:
            How many entries of each tensor are NaN or infinite, int64, which a packed bucket learns on the way.
        """
        lane = self._lanes[index]
        if isinstance(lane, _Dense):
            with self._metrics.stage("pack"):
                packing.flatten(corrected, correction.factors, lane.buffer)
            lane.reduction = self._start_reduction(lane.bucket, lane.buffer, "dense")
            return None
        with self._metrics.stage("accumulate"):
            lane.next_rms = lane.rms
            if self.step % importance.RMS_REFRESH == 0:
                lane.next_rms = importance.root_mean_square(self._weights_of(lane.bucket))
        lane.proposals = lane.explored = None
        counts = [] if sent_whole(self._metrics.density) else self._shares(lane)
        if any(counts):
            return self._propose(lane, corrected, correction, counts)
        with self._metrics.stage("accumulate"):
            return lane.residual.accumulate(corrected, correction)

    def _shares(self, lane: _Packed) -> list[int]:
        """Entries that each root proposes of each tensor; what is explored is drawn here, the same on every rank."""
        bucket = lane.bucket
        lane.budget = selection.budgets(bucket.numels, self._metrics.density)
        drawn, counts = selection.shares(lane.budget, self._policy.explore, self._roots)
        if any(drawn):
            lane.explored = selection.explore(drawn, bucket.offsets, self._seed, self.step, bucket.index)
        return counts

    def _propose(self, lane: _Packed, corrected: Sequence[Tensor], correction: Correction, counts: list[int]) -> Tensor:
        """Stages 1 to 4: select and send, where this rank is a root of the bucket; accumulate and receive elsewhere."""
        bucket, metrics, score = lane.bucket, self._metrics, self._policy.score
        roots = self._policy.roots.of(self._seed, self.step, bucket.index, self._comm.size)
        if self._comm.rank in roots:
            with metrics.stage("select"):
                selecting = Selecting(score.name, score.parameters(lane.next_rms), counts)
                message, nonfinite = lane.residual.accumulate_select(
                    corrected, correction, self._weights_of(bucket), selecting
                )
        else:
            with metrics.stage("accumulate"):
                nonfinite = lane.residual.accumulate(corrected, correction)
                message = torch.empty(sum(counts), dtype=torch.int32, device=bucket.device)
        with metrics.stage("agree"), metrics.sending("indices"):
            name = f"bucket {bucket.index} indices"
            lane.proposals = agreement.Proposals(self._comm, roots, message, name=name)
        return nonfinite

    def reduce(self) -> None:
        """Stages 4 to 6 of every packed bucket: agree, pack, start the reduction. All buckets have been started."""
        for lane in self._lanes:
            if isinstance(lane, _Packed):
                with self._metrics.stage("agree"):
                    lane.indices = self._agreed(lane)
                with self._metrics.stage("pack"):
                    values = self._pack(lane)
                lane.reduction = self._start_reduction(lane.bucket, values, "values")

    def _agreed(self, lane: _Packed) -> Tensor | None:
        """The index set of a bucket; None where it is sent whole."""
        if sent_whole(self._metrics.density):
            return None
        bucket = lane.bucket
        messages = lane.proposals.wait() if lane.proposals is not None else []
        name = f"bucket {bucket.index} indices at step {self.step}"
        sets = [wire.decode_indices(message, bucket.numel, name=name) for message in messages]
        if lane.explored is not None:
            sets.append(lane.explored.to(bucket.device))
        return agreement.union(sets)

    def _pack(self, lane: _Packed) -> Tensor:
        state, indices = lane.residual, lane.indices
        self._metrics.selected(lane.bucket.numel if indices is None else indices.numel(), lane.bucket.numel)
        if indices is None:
            return packing.pack_whole(state.next_residual)
        masked = state.next_velocity if self._policy.mask_velocity else None
        return packing.pack(state.next_residual, masked, indices, lane.bucket.offsets)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Stages 6 and 7: wait for the reductions, write the averages, and let the step take effect.

        Args:
            outputs: one contiguous tensor per parameter of the Plan; all of it is overwritten.
        """
        for lane in self._lanes:
            assert lane.reduction is not None, "finish() before reduce()"
            with self._metrics.stage("reduce"):
                values = lane.reduction.wait()
            with self._metrics.stage("unpack"):
                targets = [outputs[i] for i in lane.bucket.members]
                if isinstance(lane, _Packed) and lane.indices is not None:
                    packing.unpack(targets, lane.indices, values)
                else:
                    packing.unflatten(targets, values)
            lane.reduction = None
            if isinstance(lane, _Packed):
                lane.residual.commit()
                lane.rms = lane.next_rms
        self.step += 1
        self._metrics.exchanged()

    def abandon(self) -> None:
        """The step is not made: wait for what is under way and forget it; residual and velocity are as before."""
        for lane in self._lanes:
            assert lane.reduction is not None, "abandon() before reduce()"
            lane.reduction.drain()
            lane.reduction = None
            if isinstance(lane, _Packed):
                lane.residual.rollback()
        self._metrics.exchanged()

    def _start_reduction(self, bucket: Bucket, values: Tensor, content: Content) -> Reduction:
        with self._metrics.stage("reduce"), self._metrics.sending(content):
            return self._mean.start(self._comm, values, name=f"bucket {bucket.index} {content}")

    def _weights_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._weights[i].detach().contiguous() for i in bucket.members]

    def _check_start(self) -> None:
        """Compare step and weights by their sums of squares; costs 8 bytes per parameter, once."""
        squares = ops.square_sum([weight.detach().contiguous() for weight in self._weights]).cpu()
        device = self._weights[0].device if self._weights else torch.device("cpu")
        row = torch.cat([torch.tensor([float(self.step)], dtype=torch.float64), squares]).to(device)
        with self._metrics.sending("headers"):
            gathered = self._comm.allgather(row, name="weights at the start").wait()
        # As bits, so that NaN equals NaN.
        rows = gathered.reshape(self._comm.size, -1).cpu().view(torch.int64)
        differs = (rows != rows[0]).nonzero()
        if not len(differs):
            return
        rank, column = min(((int(r), int(c)) for r, c in differs), key=lambda pair: pair[1])
        if column == 0:
            steps = gathered.reshape(self._comm.size, -1)[:, 0].tolist()
            raise RankMismatchError(
                f"rank 0 continues at step {steps[0]:.0f}, rank {rank} at step {steps[rank]:.0f}: load a checkpoint on "
                "all ranks, each its own, or one that was saved after flush()"
            )
        raise RankMismatchError(
            f"parameter {self._plan.params[column - 1].name!r} has other weights on rank {rank} than on rank 0: call "
            "ringprune.broadcast_parameters(model.state_dict()) or hvd.broadcast_parameters before the first step"
        )

    # -- between steps ------------------------------------------------------------------------------------------------

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send all residuals, whole; afterwards nothing is private to a rank. Velocities become their mean.

        Args:
            outputs: one contiguous tensor per parameter; those of packed buckets are overwritten with the average.
        """
        for lane in self._lanes:
            if not isinstance(lane, _Packed):
                continue
            state, bucket = lane.residual, lane.bucket
            residual = self._start_reduction(bucket, packing.pack_whole(state.residual), "dense")
            velocity = None
            if state.velocity is not None:
                with self._metrics.sending("dense"):
                    velocity = Mean().start(self._comm, state.velocity, name=f"bucket {bucket.index} velocity")
            packing.unflatten([outputs[i] for i in bucket.members], residual.wait())
            if velocity is not None:
                velocity.wait()

    def tally(self) -> dict[str, int]:
        """How selection went on this rank: see :class:`ringprune.ops.Hints`."""
        total = dict.fromkeys(ops.TALLY, 0)
        for lane in self._lanes:
            if isinstance(lane, _Packed):
                total = {name: total[name] + count for name, count in lane.residual.hints.counts().items()}
        return total

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved of each packed parameter, as views by name: residual, velocity, rms."""
        state: dict[str, dict[str, Tensor]] = {}
        for lane in self._lanes:
            if not isinstance(lane, _Packed):
                continue
            for place, member in enumerate(lane.bucket.members):
                spec, part = self._plan.params[member], slice(*lane.bucket.offsets[place : place + 2])
                entry = {"residual": lane.residual.residual[part].view(spec.shape), "rms": lane.rms[place]}
                if lane.residual.velocity is not None:
                    entry["velocity"] = lane.residual.velocity[part].view(spec.shape)
                state[spec.name] = entry
        return state

    def resumed(self, step: int) -> None:
        """The state was overwritten from a checkpoint made after ``step`` exchanges; check again before going on."""
        self.step = step
        self._checked = False
