"""How long a step takes: compute, the processor's part of the exchange, and messages behind both.

The processor does one thing after the other: layers backward, and in between, as the wrapper does, what buckets need of
it (``Exchange.start`` and ``reduce`` in ringprune/exchange/exchange.py: the same order of turns). The network carries
one collective after the other, in the order in which they are started, and goes on by itself meanwhile.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ringprune.metrics import Content
from ringprune.plan import Bucket, Plan, Route
from ringprune.policies.policy import Policy
from ringprune.prediction.link import Network
from ringprune.prediction.messages import Message, bytes_sent, check_predictable, verdict
from ringprune.prediction.speeds import Speeds
from ringprune.prediction.work import Work, work_of
from ringprune.prediction.workload import BUCKET_BYTES, Workload

__all__ = ["Prediction", "Setting", "predict"]

SHARED = 1.5
"""Ranks that take longer by this factor for waiting on one another's account share their processors."""


@dataclass(frozen=True)
class Setting:
    """What is trained on what.

    Args:
        workload: the model, and its compute.
        ranks: how many.
        link: each rank's.
        speeds: what the exchange costs the processor.
        bucket_bytes: the wrapper's.
        overlap: exchanges start during backward; else behind it.
        groups: the communicator sums groups of tensors where they are (its ability ``"group"``).
        asked: messages move on only while somebody asks for them, as MPI's: gradients and coding do that, other passes
            of the exchange do not.
    """

    workload: Workload
    ranks: int
    link: Network
    speeds: Speeds
    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = True
    groups: bool = False
    asked: bool = False

    def plan(self, policy: Policy) -> Plan:
        """The buckets that the wrapper makes of the workload."""
        return self.workload.plan(policy, self.bucket_bytes, groups=self.groups)

    def work_of(self, bucket: Bucket, policy: Policy, route: Route | None = None) -> Work:
        """A bucket's part of an exchange; see :func:`ringprune.prediction.work.work_of`."""
        return work_of(bucket, policy, self.ranks, self.speeds, route, groups=self.groups)


@dataclass(frozen=True)
class Prediction:
    """An average step after warm-up.

    Attributes:
        seconds: from the beginning of a step to that of the next; the optimizer's own arithmetic is not in it.
        compute_seconds: forward and backward pass.
        local_seconds: what the exchange takes of the processor, and waits for one that is shared.
        network_seconds: what its messages take, one after the other.
        bytes_sent: by each rank, by content.
    """

    seconds: float
    compute_seconds: float
    local_seconds: float
    network_seconds: float
    bytes_sent: dict[Content, float]

    @property
    def exposed_seconds(self) -> float:
        """How much longer than compute alone."""
        return self.seconds - self.compute_seconds


def predict(setting: Setting, policy: Policy, routes: Sequence[Route] | None = None) -> Prediction:
    """Predict a step under a policy.

    Args:
        setting: what is trained on what.
        policy: how it is exchanged.
        routes: of each bucket of the workload's plan under this policy; None as the plan has them.

    Raises:
        ConfigurationError: its messages depend on the gradients, or it schedules them.
    """
    check_predictable(policy)
    workload, ranks = setting.workload, setting.ranks
    plan = setting.plan(policy)
    chosen = [bucket.route for bucket in plan.buckets] if routes is None else routes
    works = [setting.work_of(b, policy, route) for b, route in zip(plan.buckets, chosen, strict=True)]
    run = _Run(setting, works, verdict(policy))
    compute = workload.compute_seconds
    sent = bytes_sent([turn.message for work in works for turn in work.turns] + [run.verdict], ranks)
    steps = 1
    if policy.local_steps is None and setting.overlap:
        seconds = run.during_backward()
    else:  # the exchange follows the last of the steps, and hides behind none
        steps = 1 if policy.local_steps is None else policy.local_steps.count
        seconds = compute + run.afterwards() / steps
    return Prediction(
        seconds,
        compute,
        run.busy / steps,
        run.sending / steps,
        {content: count / steps for content, count in sent.items()},
    )


class _Run:
    """One step, event by event.

    Args:
        setting: what is trained on what.
        works: the buckets' parts, in their order.
        last: the verdict.
    """

    def __init__(self, setting: Setting, works: Sequence[Work], last: Message) -> None:
        self._setting, self._works, self.verdict = setting, works, last
        self._link, self._ranks = setting.link, setting.ranks
        self._now = 0.0
        self._held = 0.0  # seconds that messages have stood still: the network's own clock is behind by so much
        self._free = 0.0  # by that clock, when it has carried all that was sent
        self._done = [0] * len(works)  # turns made
        self._until = [0.0] * (len(works) + 1)  # likewise, of the message under way; the last is the verdict's
        self._turns: deque[int] = deque()
        self.busy = self.sending = 0.0

    def during_backward(self) -> float:
        """Buckets start as their gradients come; returns when all averages are written."""
        layers = self._setting.workload.layers
        self._now = self._setting.workload.forward_seconds
        left = [len(work.bucket.members) for work in self._works]
        of = {member: i for i, work in enumerate(self._works) for member in work.bucket.members}
        number, started = sum(len(layer.shapes) for layer in layers), 0
        for layer in reversed(layers):
            self._now += layer.backward_seconds
            for _ in layer.shapes:
                number -= 1
                left[of[number]] -= 1
            while started < len(left) and not left[started]:
                self._start(started)
                started += 1
        return self._finish()

    def afterwards(self) -> float:
        """An exchange with nothing to hide behind, of which the verdict comes first, as in update mode."""
        self._send(self.verdict, -1)
        self._wait_for(-1)
        for index in range(len(self._works)):
            self._start(index)
        return self._finish(verdict=False)

    def _start(self, index: int) -> None:
        self._spend(self._works[index].start)
        self._turns.extend([index, *(i for i in range(index) if self._done[i] < len(self._works[i].turns))])
        while self._turns and self._ready(self._turns[0]):
            self._advance(self._turns.popleft())

    def _ready(self, index: int) -> bool:
        """Whether the next turn of a bucket needs no waiting; one that has none left holds nobody up."""
        return self._done[index] == len(self._works[index].turns) or self._there(index) <= self._now

    def _finish(self, *, verdict: bool = True) -> float:
        while self._turns:
            self._advance(self._turns.popleft())
        if verdict:
            self._send(self.verdict, -1)
        under_way = list(range(len(self._works)))
        while under_way:
            under_way = [index for index in under_way if self._advance(index)]
        self._wait_for(-1)
        for index, work in enumerate(self._works):
            self._wait_for(index)
            self._spend(work.finish, asks=work.asks)
        return self._now

    def _advance(self, index: int) -> bool:
        """One turn of a bucket, once its message is there; whether another one follows."""
        work = self._works[index]
        turns = work.turns
        if self._done[index] == len(turns):
            return False
        self._wait_for(index)
        turn = turns[self._done[index]]
        self._spend(turn.seconds, asks=work.asks)
        self._send(turn.message, index)
        self._done[index] += 1
        return self._done[index] < len(turns)

    def _spend(self, seconds: float, *, asks: bool = False) -> None:
        # Threads move messages meanwhile, but where ranks share processors they wait for one as well; MPI has none.
        setting = self._setting
        held = not asks if setting.asked else setting.speeds.shared >= SHARED
        self._now += seconds
        self._held += seconds if held else 0.0
        self.busy += seconds

    def _there(self, index: int) -> float:
        """When a message will be there, if nothing holds it up from now on."""
        return self._until[index] + self._held

    def _wait_for(self, index: int) -> None:
        self._now = max(self._now, self._there(index))

    def _send(self, message: Message, index: int) -> None:
        seconds = message.seconds(self._link, self._ranks)
        self.sending += seconds
        self._free = self._until[index] = max(self._free, self._now - self._held) + seconds
