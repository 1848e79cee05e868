"""Update mode: every rank steps on its own copy of the weights; every H steps what they moved by is exchanged."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune import ops
from ringprune.checkpoint import Origin
from ringprune.devices import differing
from ringprune.errors import UsageError
from ringprune.local_gradients import LocalGradients
from ringprune.local_steps import Interval, LocalSteps, OuterStep, exact_copy, moved_by
from ringprune.mode import Mode
from ringprune.norm_statistics import NormStatistics
from ringprune.parts import Parts
from ringprune.residual import Correction
from ringprune.shared_momentum import SharedMomentum
from ringprune.verdict import shortened

__all__ = ["UpdateMode"]

_OUT_OF_STEP = (
    "the ranks have made different numbers of steps since the last exchange, which LocalSteps(growth=) counts by the "
    "learning rate: it differs between them. Let all ranks' schedulers see the same, such as an averaged loss, and "
    "step them at every step, also one that a scaler left out"
)
_SOME_FLUSH = (
    "some ranks call flush() where others exchange at the end of an interval: they have not made as many exchanges. "
    "Let all ranks call step() equally often"
)
_MEANWHILE = (
    "shared_weights() in the middle of an exchange, as by a signal's handler: there the shared weights are being made. "
    "Let the handler set a flag, and save after step()"
)
_BROADCAST = (
    "hvd.broadcast_optimizer_state() after load_state_dict() with local_steps: what every rank has loaded is its own, "
    "and would be rank 0's now. Where a script resumes leave it away, and hvd.broadcast_parameters() too"
)
_UNDONE = "What the weights have moved by since the last exchange is undone"

_log = logging.getLogger("ringprune")


class UpdateMode(Mode):
    """Makes local steps of one wrapped optimizer, and exchanges what they have moved the weights by.

    All ranks hold the shared weights ``w``; each steps on its own ``x``, the parameters themselves, with the wrapped
    optimizer as it is. After H steps ``w - x`` enters the residual, is exchanged as a gradient would be, ``w`` moves by
    the average, and ``x = w``. The optimizer's own state stays private to the rank, but for its momentum where the
    policy has that shared.

    Args:
        parts: what it is built from; its policy has ``local_steps``.
        buffers: floating-point buffers by name that are averaged at each exchange (BatchNorm's statistics).
    """

    def __init__(self, parts: Parts, buffers: Mapping[str, Tensor]) -> None:
        choice = parts.policy.local_steps
        assert choice is not None
        self._choice: LocalSteps = choice
        self._shared = [exact_copy(param) for param in parts.params]
        self._statistics = NormStatistics(buffers)
        self._interval = Interval(choice)
        self._saw_gradient = self._started = self._changed = self._overflowed = self._averaged = self._resumed = False
        self._set_aside: list[Tensor] | None = None  # inside shared_weights(): what this rank had
        self._raises = parts.settings.nonfinite == "raise"
        # All ranks decide before anything is exchanged, so nothing has to be taken back.
        super().__init__(parts, self._shared, velocity=False, spare=False)
        self._gradients = LocalGradients(parts.inner, self.params, self._policy.clipping)
        self._outer = OuterStep(choice, self._shared)
        self._momentum = None
        if choice.shares_momentum and SharedMomentum.serves(parts.inner):
            self._momentum = SharedMomentum(parts.inner, self.params, self._shared, late=choice.momentum == "mean")

    def _bucket_full(self, index: int) -> None:
        """Gradients stay on the rank."""

    def _gradient_passed(self) -> None:
        """Nothing is under way."""

    def _excess(self, name: str) -> None:
        """Gradients add up locally, however many there are."""

    @property
    def local_steps(self) -> int:
        """Steps made since the last exchange, by this rank alone."""
        return self._interval.steps

    def idle(self, call: str) -> None:
        """Check that ``call`` is not made inside :meth:`shared_weights`, nor between backward and step."""
        if self._set_aside is not None:
            raise UsageError(f"{call} inside shared_weights(): there the parameters are not this rank's own")
        if not self._open and all(param.grad is None for param in self.updated):
            self.backward.reset()  # thrown away by zero_grad() of the model
        super().idle(call)

    def prepare_saving(self, *, for_horovod: bool) -> None:
        """As every mode; Horovod's broadcast, after a checkpoint was loaded, would make every rank's own rank 0's.

        Raises:
            UsageError: so it would; on all ranks.
        """
        super().prepare_saving(for_horovod=for_horovod)
        if for_horovod and self.loaded_own:
            raise UsageError(_BROADCAST)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def step(self, loss_scale: float, *, overflow: bool) -> None:
        """One local step; the H-th since the last exchange is followed by the next exchange.

        Args:
            loss_scale: what the gradients were multiplied by.
            overflow: a GradScaler found infinities: this rank's step is left out.

        Raises:
            UsageError: inside :meth:`shared_weights`; on this rank.
            NonFiniteGradientError, UsageError: at an exchange, on all ranks together.
        """
        if self._set_aside is not None:
            raise UsageError("step() inside shared_weights(): there the parameters are not this rank's own")
        self._saw_gradient |= self.backward.touched
        self.backward.reset()
        self._begin()
        made = not (overflow or self._gradients_are_bad())
        moved = [made and param.grad is not None for param in self.params]  # a hook of the step may drop gradients
        if made:
            self._step_alone(loss_scale)
            self._stepped()
        else:
            self.metrics.skipped_steps += 1
        if self._momentum is not None:
            self._momentum.stepped(moved)
        self._interval.stepped(self._inner.param_groups)
        if self._interval.full:
            self._exchange(flushing=False)

    def _step_alone(self, loss_scale: float) -> None:
        """Let the wrapped optimizer step. Where it fails on this rank alone, all raise at the next exchange."""
        try:
            self._gradients.make_dense()
            self._gradients.correct(loss_scale)
            self._unscale_rows(loss_scale)
            self._inner.step()
        except Exception as error:
            _log.exception(
                "rank %d: the wrapped optimizer failed; all ranks raise at the next exchange", self._comm.rank
            )
            self.note_fault(f"{type(error).__name__} in step() of the wrapped optimizer: {error}")

    def _begin(self) -> None:
        """Before a step or a flush, of which ranks need not make the same one first.

        Raises:
            RankMismatchError: the first time, where ranks do not continue from the same place; on all of them.
        """
        self._begin_interval(adopting=False)
        self.exchange.check_start(resumed=self._resumed)
        if not self._averaged:
            self._average_statistics()  # before the first exchange: forward passes have made them each rank's own

    def _begin_interval(self, *, adopting: bool = True) -> None:
        """The shared weights are what the parameters are now, changed by the caller since the last exchange or not.

        Where they were, all ranks look at the next exchange whether it was alike, and the statistics are taken to have
        come with them: ``adopting``, where no forward pass in training need have changed those on this rank alone.
        """
        if self._interval.steps:
            return
        pairs = zip(self._shared, self.params, strict=True)
        # A 16-bit parameter is its float32 weight rounded, unless the caller has changed it.
        differ = differing((shared.to(param.dtype), param.detach()) for shared, param in pairs)
        for i in differ:
            self._shared[i].copy_(self.params[i].detach())
        changed = bool(differ)
        self._changed |= changed and self._started
        self._started = True
        if adopting and (changed or not self._averaged):
            self._statistics.adopt()

    def _gradients_are_bad(self) -> bool:
        """Whether a gradient of this rank holds NaN or infinity; noted for the next exchange where that is to raise."""
        self._verdict.count(*self._gradients.count_nonfinite())
        findings = self._verdict.read() + self._bad_rows()
        if self._raises:
            for finding in findings:
                self._verdict.note_nonfinite(finding)
        elif findings:
            _log.warning("rank %d: local step skipped: %s", self._comm.rank, shortened(findings))
        return bool(findings)

    # -- an exchange --------------------------------------------------------------------------------------------------

    def _exchange(self, *, flushing: bool) -> None:
        """Exchange what the weights have moved by since the last time, and go on from the shared weights.

        Args:
            flushing: in flush(), before which ranks may have made different numbers of steps.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together; the weights are those of the last exchange.
        """
        steps = self._interval.steps
        self._interval.begin()
        self._note_strangers()
        self._verdict.saw_gradient = self._saw_gradient
        self._saw_gradient = False
        self._open = True
        try:
            moved = self._moved()
            self.exchange.begin(steps)
            found = (self._changed, self._overflowed, flushing, steps > 0)
            growing = self._choice.growth > 0
            self._verdict.start(*found, *((steps, steps**2) if growing else ()), wide=growing)
            made = self._verdict.wait()
            changed, overflowed, flushes, stepped, *numbers = self._verdict.more
            astray = self._astray(flushes, *numbers)
            if changed:
                self.exchange.check_weights()
            self._changed = False  # else all look again: nobody trains on with weights of its own
            if made and not astray:
                self._exchange_updates(moved, steps, coasting=bool(stepped))
            else:
                self.metrics.exchanged()
                if astray and not self._verdict.faulty_ranks:
                    raise UsageError(f"{astray}. {_UNDONE}")
                # An optimizer whose weights have overflowed does not recover: to skip would be to skip for ever.
                self._verdict.raise_or_skip(always=bool(overflowed))
        finally:
            # Also where it failed: all ranks go on from the weights they share.
            self._verdict.clear()
            self._open = self._overflowed = False
            if self._momentum is not None:
                self._momentum.forget_interval()
            self._restore()
        self._compare("the shared weight of", self._shared)
        self.exchange.look_ahead()

    def _astray(self, flushing: int, steps: int = 0, squares: int = 0) -> str | None:
        """What is wrong where ranks are not at the same exchange; the same on all, of sums over them."""
        size = self._comm.size
        if 0 < flushing < size:
            return _SOME_FLUSH
        # Of unequal numbers the mean of the squares is not the square of the mean.
        return _OUT_OF_STEP if not flushing and size * squares != steps**2 else None

    def _moved(self) -> list[Tensor]:
        """What the weights have moved by: contiguous, float32 or float64; noted where it is not finite."""
        moved = moved_by(self._shared, [param.detach() for param in self.params])
        self._verdict.count(range(len(moved)), ops.count_nonfinite(moved))
        for finding in self._verdict.read("weight"):
            self._overflowed = True
            self._verdict.note_nonfinite(finding)
        return moved

    def _exchange_updates(self, moved: Sequence[Tensor], steps: int, *, coasting: bool) -> None:
        """``coasting``: outer momentum moves the weights too, as it does once for each interval."""
        for bucket in self.plan.buckets:
            tensors = len(bucket.members)
            correction = Correction([1.0] * tensors, [0.0] * tensors, [False] * tensors)
            self.exchange.start(bucket.index, [moved[i] for i in bucket.members], correction, count=False)
        self.exchange.reduce()
        exact = self.exchange.exact()
        self.exchange.finish(moved)
        if self._momentum is not None:
            self._momentum.apply(moved, exact, steps)
        self._outer.apply(moved, coasting=coasting)
        self._average_statistics()

    def _average_statistics(self) -> None:
        """All ranks call this."""
        self._averaged = True
        self._statistics.average(self._comm, self.metrics)

    def _restore(self) -> None:
        """``x = w``."""
        self._restore_weights()
        self._statistics.restore()

    @torch.no_grad()
    def _restore_weights(self) -> None:
        if self.params:
            torch._foreach_copy_(list(self.params), self._shared)

    # -- between steps ------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # as a program may evaluate
    def flush(self) -> None:
        """Exchange what is left of an interval, then all residuals, whole; the optimizer's state stays private.

        Ranks may have made different numbers of steps since the last exchange.

        Raises:
            UsageError: between backward and step.
            NonFiniteGradientError: as an exchange does.
        """
        self.idle("flush()")
        self._begin()
        self._saw_gradient = True
        self._exchange(flushing=True)
        averages = [torch.zeros_like(shared) for shared in self._shared]
        self.exchange.flush(averages)
        self._outer.apply(averages, coasting=False)
        with self.metrics.sending("headers"):
            self._interval.agree(self._comm)
        if self._momentum is not None:
            self._momentum.exchanged_all()
        self._restore()
        self.loaded_own = False

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside, the parameters and BatchNorm's statistics are those that all ranks share: of the last exchange.

        Raises:
            UsageError: one of them inside another, or in the middle of an exchange.
        """
        if self._open:
            raise UsageError(_MEANWHILE)
        if self._set_aside is not None:
            raise UsageError("shared_weights() inside shared_weights()")
        self._begin_interval()
        self._set_aside = [tensor.detach().clone() for tensor in self._own()]
        self._restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._own(), self._set_aside, strict=True):
                    tensor.copy_(value)
            self._set_aside = None

    def _own(self) -> list[Tensor]:
        """Parameters and statistics as this rank trains them."""
        return [*self.params, *self._statistics.own.values()]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def keeps_something(self) -> bool:
        """Between exchanges weights are each rank's own, and the wrapped optimizer's state always is."""
        return True

    def made(self) -> dict[str, Any]:
        """As every mode, and what is told at the end of the interval."""
        return super().made() | {"findings": self._verdict.findings, "fault": self._verdict.fault}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Residuals and momenta; the shared weights, and in the middle of an interval this rank's own too."""
        self._begin_interval()
        state = self.exchange.state()
        for i, (spec, shared) in enumerate(zip(self.plan.params, self._shared, strict=True)):
            entry = state.setdefault(spec.name, {})
            entry["shared"] = shared
            if self._outer.momentum:
                entry["outer_momentum"] = self._outer.momentum[i]
            if self._momentum is not None:
                entry |= self._momentum.state(i)
        for name, shared in self._statistics.shared.items():
            state[f"buffer {name}"] = {"shared": shared}
        if pace := self._interval.state:
            state["local steps"] = pace
        for name, own in self._own_by_name().items():
            if self._interval.steps or name.startswith("buffer "):  # a forward pass may have changed these since
                state[name]["own"] = own
        return state

    def _own_by_name(self) -> dict[str, Tensor]:
        names = [*(spec.name for spec in self.plan.params), *(f"buffer {name}" for name in self._statistics.own)]
        own = self._own() if self._set_aside is None else self._set_aside
        return {name: tensor.detach() for name, tensor in zip(names, own, strict=True)}

    def state_like(self, saved: Mapping[str, Mapping[str, Tensor]], *, make: bool) -> dict[str, dict[str, Tensor]]:
        """:meth:`state`, with this rank's own weights just where a checkpoint has them."""
        state = self.state()
        for name, own in self._own_by_name().items():
            state[name].pop("own", None)
            if "own" in saved.get(name, {}):
                state[name]["own"] = own
        return state

    def resumed(self, saved: Mapping[str, Mapping[str, Tensor]], origin: Origin) -> None:
        """The state was overwritten from a checkpoint; between intervals the parameters become the shared weights."""
        super().resumed(saved, origin)
        self._changed = self._overflowed = False
        self._interval.steps, self._started = origin.local_steps, True
        self._resumed, self.loaded_own = origin.local_steps > 0, not origin.flushed
        self._averaged = origin.step > 0 or self._resumed
        self._saw_gradient = origin.local_steps > 0
        if not origin.local_steps:
            self._restore_weights()
