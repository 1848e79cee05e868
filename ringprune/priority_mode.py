"""Gradient mode across the barrier between two steps (P3): each layer's forward pass waits for that layer alone.

::

    backward          gradients are cut into slices, which go out by priority while the rest is computed
    step()            notes the settings, and returns
    forward           before a layer runs, its averages are waited for and the wrapped optimizer steps on them
    synchronize()     makes what is left of the step: before parameters are read outside the forward pass

What one rank finds out about a step (a gradient that is not finite, calls in the wrong order) all ranks learn at the
end of its exchange, and so raise in the next call of step() or synchronize().
"""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune.driver import Driver
from ringprune.errors import RingPruneError, UsageError
from ringprune.exchange.dispatch import Dispatch
from ringprune.gates import Gates
from ringprune.gradient_mode import GradientMode
from ringprune.layer_steps import LayerSteps
from ringprune.parts import Parts
from ringprune.plan import Bucket
from ringprune.policies import Policy
from ringprune.schedule import LayerPriority
from ringprune.slicing import InPieces, part_of
from ringprune.verdict import Verdict
from ringprune.wire import value_code

__all__ = ["PriorityMode"]

SHOWN = 3
"""Parameters that a warning names."""

_MADE = (
    "With a schedule that comes to light when layers have made the step: go back to a checkpoint, or use a policy "
    'without a schedule and nonfinite="skip"'
)
_AT_ONCE = (
    "step() makes the whole step itself, since the hooks did not run before that use: it was outside the model's "
    "forward pass, or in a graph that was compiled before the optimizer was wrapped"
)
_AVERAGED = "No weight has changed since; what was kept back of earlier gradients is no longer as before the exchange"

_log = logging.getLogger("ringprune")


class PriorityMode(GradientMode):
    """Exchanges gradients by priority, and makes the wrapped optimizer's step layer by layer.

    Args:
        parts: what it is built from, with a sliced Plan and the model.
    """

    def __init__(self, parts: Parts) -> None:
        schedule, sliced = parts.policy.schedule, parts.sliced
        assert isinstance(schedule, LayerPriority)
        assert sliced is not None
        assert parts.model is not None
        self._pieces = sliced.pieces
        super().__init__(parts)
        buckets = self.plan.buckets
        self._params_of = [sliced.members(bucket) for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in self.params]
        for index, members in enumerate(self._params_of):
            for i in members:
                self._buckets_of[i].append(index)
        self._device = self.params[0].device if self.params else torch.device("cpu")
        nbytes = [_wire_bytes(bucket, parts.policy) for bucket in buckets]
        dispatch = Dispatch(parts.comm, self.exchange, self.metrics, schedule, nbytes)
        # Simulated ranks are threads already, and nothing travels there.
        threaded = parts.comm.kind != "simulated" and parts.comm.threads
        self._driver = Driver(dispatch, self._device, threaded=threaded)
        self._steps = LayerSteps(parts.inner)
        this = weakref.ref(self)
        self._gates = Gates(parts.model, self.params, lambda needed: _arrive(this, needed))
        self._outputs: dict[int, Tensor] = {}  # where averages are written, until the step was made on them
        self._left: Counter[int] = Counter()  # buckets that each parameter of the step under way still misses
        self._unfinished: set[int] = set()  # buckets of it
        self._at_once = False  # waiting in the forward pass is of no use: step() waits
        self._late: list[int] = []  # parameters whose step was made when the next backward pass was under way
        self._judged = self._compared = True
        self._failed: RingPruneError | None = None  # found while a backward pass was under way
        weakref.finalize(self, _let_go, self._driver, self._gates).atexit = False

    def _in_pieces(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return InPieces(self._pieces, tensors)

    # -- during backward ----------------------------------------------------------------------------------------------

    def _gradient_passed(self) -> None:
        """The driver takes buckets further."""

    def _open_step(self, *, early: bool = False) -> bool:
        if self._open or self._failed is not None:
            return True
        self._late = [i for i, buckets in self._left.items() if buckets]
        try:
            self._make_rest()
            if not self._compared:
                self._compared = True
                if self._drift.due(self.exchange.step):
                    with self._driver:
                        self._compare("parameter", self._in_pieces([p.detach().contiguous() for p in self.params]))
        except RingPruneError as error:  # on all ranks; torch may end the process over errors out of a backward pass
            self._failed = error
            return True
        # Sent when the last bucket is, which may be before step() is called.
        self._verdict.saw_gradient = self.backward.touched
        self._note_strangers()
        with self._driver as dispatch:
            if not super()._open_step(early=early):
                return False
            rank_of = {param: place for place, param in enumerate(self._gates.order)}
            priorities = [min((rank_of.get(i, 0) for i in members), default=0) for members in self._params_of]
            dispatch.begin(priorities, self._judge)
        self._judged = self._compared = False
        self._gates.keep = self  # a wrapper that is dropped now still makes its step
        self._unfinished = set(range(len(self.plan.buckets)))
        self._left = Counter({i: len(buckets) for i, buckets in enumerate(self._buckets_of)})
        return True

    def _start(self, index: int, factors: Sequence[float] | None) -> None:
        """This rank's own part of a bucket; the driver takes it further."""
        self._open_step()
        if self._failed is not None:
            return
        bucket = self.plan.buckets[index]
        owners = self._params_of[index]
        alone = self._take(owners)
        whole = dict(zip(owners, self._gradients.of(owners), strict=True))
        pieces = [self._pieces[i] for i in bucket.members]
        grads = [part_of(whole[piece.param], piece) for piece in pieces]
        with self._driver as dispatch:
            correction = self._correction(bucket, self._factors(grads), alone)
            self._verdict.count(bucket.members, self.exchange.start_alone(index, grads, correction))
            self._driver.follow()
            dispatch.ready(index)
        self._driver.go()

    def _judge(self) -> Verdict:
        """All messages of the step have been started: send what this rank has found."""
        self._verdict.note_counted()
        self._verdict.start()
        return self._verdict

    # -- the step -----------------------------------------------------------------------------------------------------

    def finish(self, *, stepping: bool) -> bool:
        """Start what is left; where nobody steps at once, wait for all of it, with the averages in ``param.grad``.

        Returns:
            True: what is found about a step comes to light after it.

        Raises:
            NonFiniteGradientError, UsageError: of the step before, on all ranks together.
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("step() inside torch.inference_mode(): layers step later, outside of it; leave it away")
        self._open_step()
        self._raise_failure()
        self._look_for_early_use()
        held, self._held = self._held, []
        for index in [*held, *self.backward.remaining()] if self._overlap else range(len(self.plan.buckets)):
            self._start(index, None)
        self._note_changes()
        with self._driver as dispatch:
            self._driver.follow()
            dispatch.seal()
        self._driver.go()
        self.backward.reset()
        self._open = False
        self._outputs = dict(enumerate(self._gradients.outputs()))
        for param in self.params:
            param.grad = None  # what was one is where the average is written
        if not stepping:
            with _plain(self._device):
                self._finish(range(len(self.plan.buckets)))
                self._write_averages()
            self._conclude(_AVERAGED)
        return True

    def _raise_failure(self) -> None:
        """What was found about the step before; nothing is kept of the backward pass since."""
        error, self._failed = self._failed, None
        if error is not None:
            self._held = []
            self.backward.reset()
            for param in self.params:
                param.grad = None
            raise error

    def _look_for_early_use(self) -> None:
        """Parameters that have a gradient, and had not made their step when backward began, were read before it."""
        early = [i for i in self._late if self.params[i].grad is not None]
        if early:
            self._at_once |= self._gates.early(early)
            _log.warning(
                "the forward pass of exchange %d used %s before its last step was made, in another place than the pass "
                "that was watched; from now on %s (docs/sharp-bits.md, A schedule)",
                self.exchange.step,
                ", ".join(repr(self._specs[i].name) for i in early[:SHOWN]),
                _AT_ONCE if self._at_once else "it is waited for before the model runs",
            )

    def _write_averages(self) -> None:
        for i, output in self._outputs.items():
            self.params[i].grad = output
        self._outputs = {}

    def step(self) -> None:
        """Note what the step is to be made with; layers make it when they are needed."""
        if self._unfinished:
            self._stepped()
            self._steps.remember()
            # A scheduler of the wrapped optimizer asks whether that has made a step.
            self._inner._opt_called = True  # type: ignore[attr-defined]  # private to torch
            if self._at_once:
                self.arrive(range(len(self.params)))
        else:  # after synchronize(): the averages are in place
            self._compared = True
            super().step()

    def settle(self) -> bool:
        """Make what is left of a step, and tell what the ranks have found about it.

        Nothing is sent but where something was found: one rank may do this alone.

        Returns:
            Whether no gradients are there that could be exchanged.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together; the step was made. Nothing is kept of a backward
                pass since.
        """
        try:
            self._make_rest()
        except RingPruneError as error:
            self._failed = error
            self._raise_failure()
        return not self._open and not self.backward.touched

    def _make_rest(self) -> None:
        if not self._open and not self._judged:
            self.arrive(range(len(self.params)))
            self._conclude(_MADE)

    def arrive(self, needed: Iterable[int]) -> None:
        """Return when these parameters are up to date: all of their part of the step has been made."""
        if self._open or not self._unfinished:
            return
        self._steps.check()
        with _plain(self._device):
            made = self._finish(sorted({index for i in needed for index in self._buckets_of[i]} & self._unfinished))
            if made:
                self._step_on(made)
        if not self._unfinished:
            self._gates.keep = None

    def _finish(self, buckets: Iterable[int]) -> list[int]:
        """Wait for buckets and write their averages; the parameters that are complete with them."""
        buckets, complete = list(buckets), []
        self._driver.wait_for(buckets)
        for index in buckets:
            with self._driver:
                bucket = self.plan.buckets[index]
                pieces = [self._pieces[i] for i in bucket.members]
                self.exchange.finish_one(index, [part_of(self._outputs[p.param], p) for p in pieces])
                self._driver.follow()  # the thread may get the memory of what has just been read
            self._unfinished.discard(index)
            for i in self._params_of[index]:
                self._left[i] -= 1
                if not self._left[i]:
                    complete.append(i)
        return complete

    def _step_on(self, chosen: Sequence[int]) -> None:
        params = [self.params[i] for i in chosen]
        kept = [param.grad for param in params]
        for i, param in zip(chosen, params, strict=True):
            param.grad = self._outputs.pop(i)
        try:
            with self._steps.only(params):
                if self._momentum is not None:
                    self._momentum.apply(chosen)
                self._inner_step()
        finally:
            for param, grad in zip(params, kept, strict=True):
                param.grad = grad

    def _conclude(self, late: str) -> None:
        """The exchange has been made: settle it with the other ranks; ``late`` tells what can no longer be helped."""
        self._driver.run_out()
        self._judged, self._gates.keep = True, None
        with self._driver:
            self.exchange.conclude()
            made = self._verdict.wait()
            try:
                if not made:
                    self._verdict.raise_or_skip(late=late)
            finally:
                # A fault that was found after the others had gone out goes with the next.
                self._verdict.clear(self._verdict.fault if made else None)

    # -- between steps ------------------------------------------------------------------------------------------------

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """The parameters, once what is left of a step has been made; one rank may enter it alone."""
        self.settle()
        yield

    def _keeps_back(self) -> list[bool]:
        keeping = {p.param for p, kept in zip(self._pieces, self.exchange.keeps(), strict=True) if kept}
        return [i in keeping for i in range(len(self.params))]

    def flush(self) -> None:
        """Send all residuals, whole, and step on them; parameters that keep nothing back stay as they are.

        Raises:
            UsageError: an exchange is under way, or the step would be one of learning rate 0.
        """
        self.settle()
        super().flush()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a checkpoint must hold besides the wrapped optimizer's state, as views by parameter name."""
        self.settle()
        return super().state()

    def stats(self) -> dict[str, Any]:
        """All that is counted, as plain numbers; slices of a parameter are added up."""
        with self._driver:
            stats = super().stats()
        pieces = stats["parameters"]
        parameters: dict[str, Counter[str]] = {}
        for piece, spec in zip(self._pieces, self.plan.params, strict=True):
            total = parameters.setdefault(self._specs[piece.param].name, Counter())
            total.update(pieces[spec.name])
        return stats | {"parameters": {name: dict(total) for name, total in parameters.items()}}

    def close(self, *, flushed: bool = False) -> None:
        """Make what is left of a step, and let go of the model."""
        try:
            self.settle()
        finally:
            _let_go(self._driver, self._gates)
            super().close(flushed=flushed)


def _wire_bytes(bucket: Bucket, policy: Policy) -> int:
    """What a bucket's values take on the wire, and about that of its indices."""
    packed = bucket.route == "packed"
    count = max(1, round(policy.density.target * bucket.numel)) if packed else bucket.numel
    code = value_code(policy.values if packed else policy.dense_values) if bucket.dtype == torch.float32 else None
    values = count * bucket.dtype.itemsize if code is None else code.size(count)
    return values + (2 * count if packed else 0)


@contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """Whatever mode the program is in where it comes to a gate, a step is made as ``step()`` makes it.

    Forward passes often run under autocast, which would round what an optimizer multiplies (Adafactor's moments).
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _let_go(driver: Driver, gates: Gates) -> None:
    driver.close()
    gates.close()


def _arrive(mode: "weakref.ref[PriorityMode]", needed: Sequence[int]) -> None:
    """A hook's call, which does not keep the wrapper alive."""
    alive = mode()
    if alive is not None:
        alive.arrive(needed)
