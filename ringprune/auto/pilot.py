"""Flies one training: times steps, measures the ranks, has all of them agree, and changes what exchanges."""

import json
import logging
import math
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from ringprune import arguments
from ringprune.auto.choice import Auto, names_of
from ringprune.auto.decision import Option, as_exchanged, choose, options, packed_of, packing, sentence, workload_of
from ringprune.auto.turns import Course, steps_within, wait_for_steps
from ringprune.clock import clock_for
from ringprune.comm.communicator import ASKED
from ringprune.errors import CheckpointError, RingPruneError
from ringprune.gradient_mode import GradientMode
from ringprune.parts import Parts
from ringprune.plan import Plan, Route, gather_texts
from ringprune.planning import make_mode, make_plan, takes_groups
from ringprune.policies import Policy
from ringprune.prediction import CPU, MeasuredLink, Setting, Speeds
from ringprune.prediction.messages import messages
from ringprune.probing.collectives import measured_link
from ringprune.probing.speeds import measured, slowest_of
from ringprune.timeline import Timeline, Times

__all__ = ["Pilot"]

SETTLING = 2
"""Steps that are let pass after a change."""

TIMED, HELD = (3, 10, 1.0), (3, 5, 0.5)
"""Steps that are timed as they are, and whose parts are timed: at least, at most, and for how many seconds."""

LEAST_INTERVAL = 200
"""Steps from one measurement to the next, at least."""

PATIENCE = 20
"""Steps at which a learning rate is 0 that are waited for, before something is left that keeps gradients back."""

HYSTERESIS = 0.1
"""Share by which, once there was a choice, another has to be faster."""

ENTRIES, REPETITIONS = 1 << 20, 5  # what speeds are measured with

_log = logging.getLogger("ringprune")


class Pilot:
    """Chooses what exchanges.

    Args:
        auto: how careful the choice is.
        parts: of the mode that training begins with, under the first of the candidates.
        bucket_bytes: the wrapper's.

    Attributes:
        mode: what exchanges now.
        chosen: which of the candidates that is.
    """

    def __init__(self, auto: Auto, parts: Parts, bucket_bytes: int) -> None:
        self._auto, self._policies, self._bucket_bytes = auto, auto.policies(parts.inner, parts.comm), bucket_bytes
        made = make_mode(parts, {})
        assert isinstance(made, GradientMode), "candidates exchange gradients, at every step"
        self.mode = made
        self._parts = replace(parts, metrics=self.mode.metrics, others=self.mode.others, strangers=self.mode.strangers)
        self._groups = takes_groups(parts.comm, hierarchical=parts.nodes is not None, scaled=parts.scale.enabled)
        self.chosen, self._policy = 0, parts.policy
        self._options: list[Option] = []
        self._ratios: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._speeds: Speeds | None = None
        self._link: MeasuredLink | None = None
        self._refused: set[int] = set()  # candidates that cannot be made
        self._unmixed: set[tuple[Any, ...]] = set()  # and mixtures of one that can: candidate and names
        self._said, self._told, self._spent, self._pace = "", -1, 0.0, 0.0
        self._deciding, self._step = parts.comm.size > 1, 0
        self._names = names_of(self._policies)
        for policy in self._policies[1:] if parts.comm.rank == 0 else ():
            arguments.advise(parts.inner, policy, parts.comm, parts.model)
        clock_for([param.device for param in parts.params])  # what cannot be timed is refused now, not in a step
        self._course: Course = self._fly()
        next(self._course, None)

    @classmethod
    def of(cls, owner: object, auto: Auto, parts: Parts, bucket_bytes: int) -> "Pilot | None":
        """A pilot, where there is something to choose; one rank chooses nothing, and loads checkpoints of several.

        It lands when its owner is dropped: the frame of its course has it, and it has the course.
        """
        if not parts.params or len(auto.policies(parts.inner, parts.comm)) < 2:
            return None
        pilot = cls(auto, parts, bucket_bytes)
        weakref.finalize(owner, _land, weakref.ref(pilot)).atexit = False  # who has the owner may be had by the pilot
        return pilot

    def stepped(self) -> GradientMode:
        """A step was made, on all ranks: what exchanges the next one."""
        if (before := self.mode).exchange.step > self._step:  # not a second step on the same averages
            self._step, kept = before.exchange.step, (before, self.chosen, self._policy)
            try:
                next(self._course, None)
            except BaseException as error:  # Ctrl-C too: ranks may be in different messages
                made, before.exchange.damage.astray = self.mode, True
                self.mode, self.chosen, self._policy = kept
                self._deciding, self._said = False, f"broken off ({type(error).__name__}): nothing more is exchanged"
                if made is not before:  # in the middle of a change
                    made.close()
                raise
        return self.mode

    def failed(self, error: Exception) -> GradientMode:
        """As :meth:`stepped`, where the step failed on this rank, and the others may have made it: they go on."""
        before = self.mode
        if not isinstance(error, RingPruneError) and self.stepped() is not before and before.fault is not None:
            self.mode.note_fault(before.fault)  # all ranks are to hear of it
        return self.mode

    def stats(self) -> dict[str, Any]:
        """What was measured, predicted and chosen, as plain numbers and words."""
        return {
            "chosen": self._names[self.chosen],
            "deciding": self._deciding,
            "said": self._said,
            "predicted_seconds": {n: o.prediction.seconds for n, o in zip(self._names, self._options, strict=False)},
            "timed_seconds": {self._names[i]: seconds for i, seconds in self._seconds.items()},
            "link_bytes_per_second": None if self._link is None else self._link.bytes_per_second,
        }

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to know of the choice."""
        return {"chosen": self.chosen, "packed": packed_of(self._policy), "first": self.mode.exchange.first}

    def resume(self, state: Mapping[str, Any], load: Callable[[GradientMode], None]) -> GradientMode:
        """Exchange as a checkpoint says, with nothing kept back yet.

        Args:
            state: from :meth:`state`.
            load: the wrapped optimizer's state, for a mode; where it raises, all is as it was.

        Raises:
            CheckpointError, UsageError: there is no such candidate; ranks may be in different messages.
        """
        self.mode.exchange.damage.check_loadable()
        chosen, packed = state.get("chosen", 0), state.get("packed")
        if not isinstance(chosen, int) or not 0 <= chosen < len(self._policies):
            raise CheckpointError(
                f"the checkpoint was made with candidate {chosen!r} of policy=Auto(); here there are "
                f"{len(self._policies)}: give Auto the candidates that it had then"
            )
        policy = packing(self._policies[chosen], packed)
        before = old, *_ = self.mode, self.chosen, self._policy
        self.mode.metrics.divide_anew(old.exchange.accounts.bytes_by_parameter())
        old.backward.close()
        try:
            # Of a candidate that has made no exchange yet, the next one is the first all the same.
            self._build(chosen, policy, old, state.get("first"))
            load(self.mode)
        except Exception:
            if self.mode is not old:
                self.mode.close()
            self.mode, self.chosen, self._policy = before
            old.watch(old.backward.passes)
            old.time(old.timeline)
            raise
        self._course, self._step = self._fly(), -1  # the checkpoint may be of any step
        next(self._course, None)
        return self.mode

    # -- the course ---------------------------------------------------------------------------------------------------

    def _fly(self) -> Course:
        """One turn for each step that was made."""
        if self._parts.comm.size == 1:
            return
        yield from wait_for_steps(SETTLING)
        hysteresis = 0.0
        while True:
            self._deciding, since, first = True, time.perf_counter(), self._step
            taken = yield from self._timed()
            times = yield from self._held()
            setting = self._measure(times)
            if setting is None:
                self._deciding = False
                return
            self._options, self._seconds = options(setting, self._policies), {}
            if self._packs_otherwise(setting):
                yield from self._change(self.chosen)
                yield from wait_for_steps(SETTLING)
                taken = yield from self._timed()
            self._options[self.chosen] = as_exchanged(setting, self._policies[self.chosen], self._policy)
            self._note(taken)
            settled, tried = self.chosen, {self.chosen}
            # What was timed long ago says less and less.
            self._ratios = {i: r if i == settled else math.sqrt(r) for i, r in self._ratios.items()}
            while (target := self._decide(tried, settled, hysteresis)) != self.chosen:
                again = target in tried
                yield from self._change(target)
                yield from wait_for_steps(SETTLING)
                if again or self.chosen != target:
                    break  # timed before in this round, as what is gone back to was
                self._note((yield from self._timed()))
                tried.add(target)
            self._say()
            self._spent = self._slowest(time.perf_counter() - since - (self._step - first) * self._seconds[self.chosen])
            self._deciding = False
            hysteresis = HYSTERESIS
            yield from wait_for_steps(self._interval)

    def _timed(self) -> Generator[None, None, float]:
        """Seconds of a step as it is made now: the median, of the rank that took longest."""
        since, number = time.perf_counter(), TIMED[0]
        seconds: list[float] = []
        while len(seconds) < number:
            yield
            now = time.perf_counter()
            seconds.append(now - since)
            if len(seconds) == 1:  # all ranks time as many steps
                self._pace = self._slowest(seconds[0])
                number = steps_within(TIMED, self._pace)
            since = time.perf_counter()
        return self._slowest(median(seconds))

    def _held(self) -> Generator[None, None, Times]:
        """Times of the parts of a step: of its compute, and of when each gradient is there."""
        params = self._parts.params
        timeline = Timeline(len(params), [param.device for param in params])
        self.mode.time(timeline)
        for _ in range(steps_within(HELD, self._pace)):
            yield
            timeline.stepped()
        self.mode.time(None)
        return timeline.times()

    def _slowest(self, seconds: float) -> float:
        """What the slowest rank took; all ranks call this."""
        return max(float(report["seconds"]) for report in self._gather({"seconds": seconds}))

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, times: Times) -> Setting | None:
        """Measure, and agree; None where that failed, and nothing will be changed any more."""
        failure, speeds = "", self._speeds
        device, comm = self._parts.params[0].device, self._parts.comm
        try:
            if speeds is None:
                costs = CPU.message, CPU.tensor  # not measured while training
                speeds = measured(*costs, entries=ENTRIES, repetitions=REPETITIONS, device=device, together=True)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        with self.mode.metrics.sending("headers"):
            link = measured_link(comm, self._kinds(), device, most=4 * self._parts.plan.numel)
        own = {
            "failure": failure,
            "compute": times.compute,
            "ready": times.ready,
            "speeds": None if speeds is None else asdict(speeds),
        }
        reports = self._gather(own)
        failed = {rank: report["failure"] for rank, report in enumerate(reports) if report["failure"]}
        if failed:
            rank = min(failed)
            self._tell(f"rank {rank} could not be measured ({failed[rank]}): it stays {self._names[self.chosen]}")
            return None
        self._link = link
        self._speeds = slowest_of([report["speeds"] for report in reports])
        all_times = [Times(report["compute"], report["ready"]) for report in reports]
        workload, overlap = workload_of(self._parts.plan.params, all_times), self._parts.settings.overlap
        return Setting(
            workload, comm.size, link, self._speeds, self._bucket_bytes, overlap, self._groups, comm.kind in ASKED
        )

    def _kinds(self) -> set[Any]:
        """The collectives that the candidates make."""
        found = {"allreduce"}
        for policy in self._policies:
            for bucket in self._plan(policy).buckets:
                routes: set[Route] = {bucket.route, "dense"}  # packed ones may be better sent whole
                sent = (message for r in routes for message in messages(bucket, policy, self._parts.comm.size, r))
                found |= {message.kind for message in sent}
        return found

    def _note(self, taken: float) -> None:
        """What is exchanged with now was timed."""
        self._seconds[self.chosen] = taken
        self._ratios[self.chosen] = taken / self._options[self.chosen].prediction.seconds

    def _packs_otherwise(self, setting: Setting) -> bool:
        """Whether what is exchanged with now had better pack other buckets than it does: rank 0 says so, and which."""
        found, candidate = self._options[self.chosen], self._policies[self.chosen]
        seconds = as_exchanged(setting, candidate, self._policy).prediction.seconds
        better = (1 + HYSTERESIS) * found.prediction.seconds < seconds
        better &= (self.chosen, *(packed_of(found.policy) or ())) not in self._unmixed
        packed = self._gather({"packed": packed_of(found.policy if better else self._policy)})[0]["packed"]
        self._options[self.chosen] = replace(found, policy=packing(candidate, packed))
        return bool(packed != packed_of(self._policy))

    def _decide(self, tried: set[int], settled: int, hysteresis: float) -> int:
        """Rank 0's choice, and what of it is packed, on all ranks: no rounding of one's processor may part them."""
        predicted = [
            math.inf if i in self._refused else option.prediction.seconds for i, option in enumerate(self._options)
        ]
        compute, margin = self._options[0].prediction.compute_seconds, self._auto.margin
        chosen = choose(predicted, compute, self._ratios, tried, settled, margin=margin, hysteresis=hysteresis)
        first = self._gather({"chosen": chosen, "packed": packed_of(self._options[chosen].policy)})[0]
        chosen = int(first["chosen"])
        self._options[chosen] = replace(self._options[chosen], policy=packing(self._policies[chosen], first["packed"]))
        return chosen

    @property
    def _interval(self) -> int:
        """Steps until all is measured again, so that measuring takes no more than its share."""
        return max(LEAST_INTERVAL, math.ceil(self._spent / self._auto.share / self._seconds[self.chosen]))

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        device = self._parts.params[0].device
        with self.mode.metrics.sending("headers"):
            texts = gather_texts(json.dumps(own), self._parts.comm, device, name="auto")
        return [json.loads(text) for text in texts]

    def _say(self) -> None:
        assert self._link is not None
        entries = self._parts.plan.numel
        said = sentence(self._options, self._names, self.chosen, self._seconds, self._link, entries)
        if self.chosen != self._told:
            self._tell(said)
        self._said, self._told = said, self.chosen

    def _tell(self, what: str) -> None:
        if self._parts.comm.rank == 0:
            _log.warning("auto: %s", what)

    # -- changing -----------------------------------------------------------------------------------------------------

    def _change(self, target: int) -> Course:
        """Exchange otherwise from the next step on; if something is kept back, after a step that sends it all."""
        old, before, wanted = self.mode, (self.chosen, self._policy), self._options[target].policy
        if old.keeps_something():
            yield from self._send_whole(old)
        old.exchange.damage.torn = True  # another mode takes over: broken off here, neither has all of it
        velocities, failure = old.velocities(), ""
        try:
            old.hand_over(velocities)
            self._build(target, wanted, old)
            self.mode.take_over()
        except Exception as error:  # no memory, above all
            failure = f"{type(error).__name__}: {error}"
        failures = [report["failure"] for report in self._gather({"failure": failure})]
        if not any(failures):
            return
        rank = next(rank for rank, text in enumerate(failures) if text)
        self._tell(f"rank {rank} cannot exchange by {self._names[target]} ({failures[rank]})")
        if target == before[0]:
            self._unmixed.add((target, *(packed_of(wanted) or ())))
        else:
            self._refused.add(target)
        old.close()
        if self.mode is not old:
            self.mode.hand_over({})  # it has made no step
        self._build(*before, old)
        self.mode.take_over()

    def _send_whole(self, old: GradientMode) -> Course:
        """What is sent at a rate of 0 is lost: wait for another, at all that keeps something back.

        But not for ever: of what trains at 0 for long all gradients are lost anyway.
        """
        inner, groups, until = self._parts.inner, old.exchange.groups_kept_back(), self._step + PATIENCE

        def now(step: int) -> bool:
            return step >= until or all(inner.param_groups[i].get("lr") != 0 for i in groups)

        old.exchange.send_whole(now)
        yield
        while not old.exchange.sends_whole:
            yield

    def _plan(self, policy: Policy) -> Plan:
        parts = self._parts
        return make_plan(policy, parts.specs, parts.params, self._bucket_bytes, (), groups=self._groups)[0]

    def _build(self, chosen: int, policy: Policy, old: GradientMode, first: int | None = None) -> None:
        """A mode that goes on where ``old`` has ended, or that began after ``first`` exchanges."""
        begin, passes = old.exchange.step if first is None else first, old.backward.passes
        mode = GradientMode(replace(self._parts, plan=self._plan(policy), policy=policy, first=begin))
        mode.backward.passes = passes
        mode.backward.reset()
        self.mode, self.chosen, self._policy = mode, chosen, policy


def _land(pilot: "weakref.ref[Pilot]") -> None:
    if (alive := pilot()) is not None:
        alive._course.close()
