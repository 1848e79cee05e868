"""Runs the lanes of all buckets in one order on every rank, and makes a step of all or of none."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm.communicator import CPU, Communicator, Nodes
from ringprune.errors import RankMismatchError, RingPruneError
from ringprune.exchange.accounts import Accounts
from ringprune.exchange.kept import KeptLane
from ringprune.exchange.lane import Lane, Setting
from ringprune.exchange.lanes import exchanging, kind_of, lane_of, longest_sum
from ringprune.exchange.rotation import Rotation
from ringprune.exchange.start_check import check_place, check_start
from ringprune.guard import Guard
from ringprune.metrics import Metrics
from ringprune.plan import Plan
from ringprune.policies.policy import Policy
from ringprune.reduction import Mean, RingChoice, choose_ring
from ringprune.residual import Correction
from ringprune.routing import sent_whole

__all__ = ["Exchange"]

ASKED_EVERY = 5e-4
"""Seconds at least from one time to the next that messages are let go on."""

PER_TENSOR = ("rms", "relevance", "guard", "overlap", "empty")
"""What is kept of a tensor as a whole; all else has its shape."""


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
        guard: looks after packed tensors; None for none.
        first: exchanges that another one made before.
        besides: asked before the first step for what else has to be equal on all ranks.

    Attributes:
        alike: all ranks have been found to start with the same weights, or need not; :meth:`begin` compares none then.
        first: as given.
        step: exchanges made, by another one too; the counter behind roots, exploration and warm-up.
        damage: what was broken off.
        accounts: what it has sent and found, for people.
        checked: whether all ranks are known to have started alike; until then :meth:`begin` waits for the others.
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
        guard: Guard | None = None,
        first: int = 0,
        besides: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self.first = self.step = first
        self._plan, self.checked, self.alike = plan, False, False
        self._differed = False  # when they looked for the first time; there is a second
        ring = RingChoice(0, "our ring, as asked for") if policy.reduction == "ring" else RingChoice.never()
        rotation = Rotation(plan, policy.turns) if policy.turns > 1 else None
        shared = (policy, comm, metrics, weights, seed, mean, velocity, spare, ring, guard, rotation)
        self._setting = Setting(*shared, first=first, besides=besides)
        self.damage = self._setting.damage
        self._keeps = [issubclass(kind_of(bucket, policy), KeptLane) for bucket in plan.buckets]
        self._lanes = [lane_of(bucket, self._setting, nodes) for bucket in plan.buckets]
        self.accounts = Accounts(plan, self._setting, self._lanes)
        self._turns: deque[Lane] = deque()
        self._error: RingPruneError | None = None
        self._asked = 0.0  # when, by the monotonic clock
        # Steps of our ring match by their order; with a schedule buckets are waited for in any.
        self._measures = policy.reduction == "auto" and nodes is None and policy.schedule is None
        self._may_send_whole: Callable[[int], bool] | None = None

    def begin(self, steps: int = 1, *, early: bool | None = None) -> bool:
        """Open an exchange; the first one also checks that all ranks start from the same weights and step.

        Args:
            steps: steps of the optimizer that it is made for.
            early: whether a backward pass goes on, where some ranks may have changed weights for the time being, as for
                adversarial examples; None where there are never any that begin there. Else ranks that differ look again
                after it: each twice, wherever it was first.

        Returns:
            Whether it is open; if not, all ranks call this again after the backward pass.

        Raises:
            RankMismatchError: they do not; on all ranks, naming the first parameter that differs.
        """
        setting, density = self._setting, self._setting.policy.density
        self.damage.check_together()
        setting.whole = setting.whole or (self._may_send_whole is not None and self._may_send_whole(self.step))
        setting.metrics.begin(density.at(self.step), steady=density.steady(self.step), steps=steps)
        try:
            self.check_start()
        except RankMismatchError:
            if early is None or self._differed:
                self._differed = False
                raise
            self._differed = True
        else:
            self._differed = False
            return True
        return False if early else self.begin(steps, early=early)

    def check_start(self, *, resumed: bool = False) -> None:
        """Once: :meth:`check_weights`, and what is chosen by measurement; ``resumed`` as there."""
        if not self.checked:
            if not self.alike:
                self.check_weights(resumed)
            self.checked = self.alike = True
            if self._measures:
                self._setting.ring = self._choose_ring()

    def check_weights(self, resumed: bool = False) -> None:
        """Whether ranks have the same weights and step, or ``resumed`` before the first one; all call this.

        Raises:
            RankMismatchError: they have not; on all ranks, naming the first parameter that differs.
        """
        check_start(self.step, resumed, self._setting, self._plan)

    def check_place(self, *, loaded: bool) -> None:
        """Whether ranks have made equally many exchanges, and have, or have not, ``loaded`` a checkpoint of their own.

        All call this, and all raise RankMismatchError if not.
        """
        device = self._plan.buckets[0].device if self._plan.buckets else CPU
        check_place(self.step, loaded, self._setting.comm, self._setting.metrics, device)

    def _choose_ring(self) -> RingChoice:
        """Who sums float32 values; measured where there is a choice, and messages long enough to care."""
        setting = self._setting
        longest = max((longest_sum(bucket, setting.policy) for bucket in self._plan.buckets), default=0.0)
        with setting.metrics.sending("headers"):
            return choose_ring(setting.comm, longest, self._plan.buckets[0].device if self._plan.buckets else CPU)

    def start(
        self, index: int, corrected: Sequence[Tensor], correction: Correction, *, count: bool = True
    ) -> Tensor | None:
        """Start bucket ``index``, and take those before it one message further.

        So the buckets form a pipeline: one is selected from while others are packed and reduced. Turns are taken in one
        order on every rank. Where the next one would have to wait it is left, and those behind it, to later calls.

        Args:
            index: position of the bucket in the Plan; buckets are started in that order on every rank.
            corrected: contiguous tensors, one per member: read before this returns, unless they are handed over.
            correction: their factors and momentum.
            count: tell how many entries of each tensor are NaN or infinite, int64; else that may be None.
        """
        if index == 0:
            self.damage.check_whole()
        started, found = self._lanes[index], self.start_alone(index, corrected, correction, count=count)
        # Lanes that are over here are over on every rank when their turn would come there.
        self._turns.extend([started] * (1 + started.eager) + [lane for lane in self._lanes[:index] if not lane.over])
        self._take_turns()
        return found

    def go_on(self) -> None:
        """After the first :meth:`start`, as often as one likes: take turns that need no waiting any more.

        MPI moves large messages only while it is asked for them, so the first sum that is not there yet is asked for: a
        backward pass without this would be over first.
        """
        now = time.monotonic()
        if now >= self._asked + ASKED_EVERY:
            self._asked = now
            self._take_turns()
            all(lane.reduced() for lane in self._lanes if lane.over)

    def _take_turns(self) -> None:
        try:
            while self._turns and self._turns[0].done() and self._error is None:
                self._turns.popleft().advance()
        except RingPruneError as error:
            self._error = error  # the same comes to all ranks, at the latest in reduce(): there all raise it

    def reduce(self, then: Callable[[], None] = lambda: None) -> None:
        """Start all messages that are left. All buckets have been started.

        Args:
            then: called once, at a place among the messages that is the same on every rank.

        Raises:
            CommunicatorError: a message is damaged, or no proposal; on all ranks.
        """
        try:
            while self._turns and self._error is None:
                self._turns.popleft().advance()
        except RingPruneError as error:
            self._error = error
        then()
        if self._error is not None:
            raise self._error
        under_way: list[Lane] = self._lanes
        while under_way:
            under_way = [lane for lane in under_way if self._advanced(lane)]

    def _advanced(self, lane: Lane) -> bool:
        self.go_on()  # what others have under way stood still while one was summed up
        return lane.advance()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the reductions, write the averages, and let the step take effect.

        Args:
            outputs: one contiguous tensor per parameter of the Plan, a sparse one where rows travel; all of it is
                overwritten.
        """
        for lane, keeps in zip(self._lanes, self._keeps, strict=True):
            lane.finish([outputs[i] for i in lane.bucket.members])
            self.damage.torn |= keeps
            self.go_on()
        self.conclude()

    def conclude(self) -> None:
        """All buckets have been finished: the step has taken effect.

        Raises:
            CommunicatorError: in a hierarchy, the nodes could not exchange a bucket; on all ranks.
        """
        for lane in self._lanes:
            lane.arrive()
        for lane in [lane for lane in self._lanes if lane.bucket.numel][-1:]:
            lane.check()
        for lane in self._lanes:
            lane.settle()
        self.accounts.report(self.step + 1)
        self.step, self.damage.torn = self.step + 1, False
        self._setting.metrics.exchanged()

    def abandon(self) -> None:
        """The step is not made: wait for what is under way and forget it; residual and velocity are as before."""
        for lane in self._lanes:
            lane.abandon()
        self._setting.metrics.exchanged()

    def look_ahead(self) -> None:
        """The weights have made their step: begin with the next one, where the policy asks for it; returns at once."""
        for lane in self._lanes:
            lane.look_ahead(self.step)

    # -- bucket by bucket, in an order that was agreed elsewhere (dispatch.py) ----------------------------------------

    def start_alone(
        self, index: int, corrected: Sequence[Tensor], correction: Correction, *, count: bool = True
    ) -> Tensor | None:
        """As :meth:`start`, and no bucket is taken further: nothing is sent."""
        lane = self._lanes[index]
        self.damage.torn |= self._keeps[index] and not self._setting.spare
        counted = ops.count_nonfinite(corrected) if count and not lane.counts else None  # before it is overwritten
        found = lane.start(self.step, corrected, correction)
        return found if counted is None else counted

    def done(self, index: int) -> bool:
        """Whether the next turn of bucket ``index`` needs no waiting."""
        return self._lanes[index].done()

    def advance(self, index: int) -> bool:
        """One turn of bucket ``index``; False where none is left after it, and its reduction is under way."""
        return self._lanes[index].advance()

    def reduced(self, index: int) -> bool:
        """Whether :meth:`finish_one` would not wait, of a bucket without turns left."""
        return self._lanes[index].reduced()

    def finish_one(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Wait for the reduction of bucket ``index``, and write the averages of its tensors."""
        self._lanes[index].finish(outputs)

    # -- between steps ------------------------------------------------------------------------------------------------

    def flush(self, outputs: Sequence[Tensor]) -> None:
        """Send all residuals, whole; afterwards nothing is private to a rank. Velocities become their mean.

        Args:
            outputs: one contiguous tensor per parameter; those of packed buckets are overwritten with the average, with
                local steps all of which something is kept back.
        """
        self.damage.check_together()
        self.forget()
        with self._setting.metrics.sending("headers"):
            self._setting.comm.barrier(name="flush()")  # a rank that has batches left may be in a step
        self.damage.torn = any(self._keeps)
        for lane, keeps in zip(self._lanes, self._keeps, strict=True):
            if keeps:
                lane.flush([outputs[i] for i in lane.bucket.members])
        self.damage.torn = False

    def send_whole(self, when: Callable[[int], bool]) -> None:
        """Send everything, and as it is, once ``when``, told the exchange's number, says so; alike on all ranks.

        Afterwards no residual holds anything.
        """
        self.forget()
        self._may_send_whole = when

    @property
    def sends_whole(self) -> bool:
        """Whether the exchange that was begun last sends everything."""
        return self._setting.whole

    def groups_kept_back(self) -> set[int]:
        """The param groups of which something is kept back."""
        lanes = zip(self._plan.buckets, self._keeps, strict=True)
        return {self._plan.params[i].group for bucket, keeps in lanes if keeps for i in bucket.members}

    def drop(self) -> None:
        """Let go of all state."""
        self._lanes.clear()

    def velocities(self) -> dict[str, Tensor]:
        """The mean over the ranks of each packed tensor's velocity, float32, by name; all ranks call this."""
        for lane in self._lanes:
            if isinstance(lane, KeptLane):
                lane.average_velocity()
        return {name: kinds["velocity"] for name, kinds in self.state().items() if "velocity" in kinds}

    def forget(self) -> None:
        """Wait for what was begun of the next step and forget it, on all ranks; it is begun again when needed."""
        for lane in self._lanes:
            lane.forget()

    def keeps(self) -> list[bool]:
        """For each parameter, whether a flush makes a step on what is kept back of it: where it travels packed."""
        keeping = {i for bucket in self._plan.buckets if bucket.route == "packed" for i in bucket.members}
        return [i in keeping for i in range(len(self._plan.params))]

    def exact(self) -> list[bool]:
        """For each parameter, whether the exchange under way sends all its entries, and as they are."""
        policy, exact = self._setting.policy, [False] * len(self._plan.params)
        whole = sent_whole(policy.density.at(self.step)) and policy.turns == 1
        for bucket in self._plan.buckets:
            packed = bucket.route == "packed"
            coded = bucket.dtype == torch.float32 and (policy.values if packed else policy.dense_values) != "fp32"
            for member in bucket.members:
                exact[member] = not coded and (whole or not packed)
        return exact

    def agreed(self) -> dict[str, Tensor | None]:
        """The index set of each packed bucket's last exchange, by a name for it; None where this rank holds none."""
        lanes = [exchanging(lane) for lane in self._lanes if lane.bucket.route == "packed"]
        return {f"the index set of bucket {lane.bucket.index}": getattr(lane, "agreed", None) for lane in lanes}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved of each parameter that keeps something, as views by name and kind."""
        state: dict[str, dict[str, Tensor]] = {}
        for lane in self._lanes:
            for member, entry in lane.state().items():
                spec = self._plan.params[member]
                state[spec.name] = {k: t if k in PER_TENSOR else t.view(spec.shape) for k, t in entry.items()}
        return state

    def resumed(self, step: int, *, flushed: bool = False) -> None:
        """The state was overwritten from a checkpoint made after ``step`` exchanges; check again before going on."""
        self.forget()
        self.step, self.checked, self.alike, self.damage.torn = step, False, False, False
        self._error = self._setting.failure = None
        self._turns.clear()
        for lane in self._lanes:
            lane.resumed(flushed=flushed or not step)
