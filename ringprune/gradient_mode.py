"""Gradient mode: gradients go into the exchange during backward, averages come out in ``param.grad``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ringprune import momentum, ops
from ringprune.averages import Averages
from ringprune.checkpoint import Origin, divide_sums
from ringprune.embedding import any_embeddings
from ringprune.errors import NonFiniteGradientError, RankMismatchError, RingPruneError, UsageError
from ringprune.flush_rate import tell_of_rates
from ringprune.gradients import Gradients, entries
from ringprune.mode import Mode
from ringprune.other_wrappers import averaged_elsewhere
from ringprune.packing import laid_out_as, no_rows
from ringprune.parts import Parts
from ringprune.plan import Bucket
from ringprune.residual import Correction
from ringprune.scaling import check_halves
from ringprune.taken import CHANGED, Taken
from ringprune.timeline import Timeline

__all__ = ["GradientMode"]


class GradientMode(Mode):
    """Exchanges the gradients of one wrapped optimizer before each of its steps.

    Args:
        parts: what it is built from.

    Attributes:
        timeline: notes when things happen, while somebody asks for it; no exchange then disturbs a backward pass.
    """

    def __init__(self, parts: Parts) -> None:
        policy = parts.policy
        self.timeline: Timeline | None = None
        # The norm over all gradients is known only after backward.
        self._overlap = parts.settings.overlap and policy.clipping.norm is None
        self._specs, self._packed = parts.specs, [policy.routing.packed(spec) for spec in parts.specs]
        self._held: list[int] = []  # buckets that are full and wait for the end of the backward pass
        self._taken = Taken(parts.params)
        kept_back = self._packed if not parts.scale.enabled else []  # a scaler divides averages by its scale
        self._averages = Averages(parts.params, [i for i, packed in enumerate(kept_back) if packed])
        self._all_keep, self._average = parts.nodes is None, parts.settings.mean.average
        takes_over = momentum.takes_over(parts.inner, policy.correction)
        super().__init__(parts, self._in_pieces(parts.params), velocity=takes_over, spare=self._overlap)
        self._gradients = Gradients(self.params, self._specs, self._verdict.note_fault)
        self._momentum = (
            momentum.TakenOverMomentum(parts.inner, parts.params, self._specs, self._packed) if takes_over else None
        )

    # -- during backward ----------------------------------------------------------------------------------------------

    def _bucket_full(self, index: int) -> None:
        if not self._overlap:
            return
        # Not in a pass that is timed; nor where another rank may wait for this one in the push of a sharded embedding.
        during = self.timeline is None and (self.exchange.checked or not any_embeddings())
        if during and not self._held and self._open_step(early=True):
            self._start(index, None)
        else:
            self._held.append(index)

    def _gradient_passed(self) -> None:
        if self._open and self._overlap:
            self.exchange.go_on()

    def _excess(self, name: str) -> None:
        self._verdict.note_fault(
            f"parameter {name!r} got more gradients than backward_passes_per_step={self.backward.passes} before "
            "step(); raise it to accumulate over more backward passes. Where a GAN's other loss reaches it, freeze it "
            "meanwhile (requires_grad_(False)); torch.utils.checkpoint has a layer twice without use_reentrant=False"
        )

    def _open_step(self, *, early: bool = False) -> bool:
        """Before the first bucket of a step is started; False where that has to wait for ``step()``, if ``early``."""
        if not self._open:
            self._taken.forget()
            try:
                self.scale.read()
                self._open = self.exchange.begin(early=early if self._overlap else None)
            except (NonFiniteGradientError, RankMismatchError):  # the next step may begin anew, on what is mended then
                self._held = []
                self.backward.reset()
                self._verdict.clear()
                raise
        return self._open

    def _start(self, index: int, factors: Sequence[float] | None) -> None:
        """Stages 1 to 4 of a bucket; ``factors`` per parameter where clipping needed all gradients."""
        self._open_step()
        bucket = self.plan.buckets[index]
        alone = self._take(bucket.members)
        grads = self._gradients.of(bucket.members)
        own = self._factors(grads) if factors is None else [factors[i] for i in bucket.members]
        found = self.exchange.start(index, grads, self._correction(bucket, own, alone), count=factors is None)
        if factors is None:
            self._verdict.count(bucket.members, found)

    def _take(self, params: Sequence[int]) -> bool:
        """Gradients are taken; whether they may be overwritten. A GradScaler reads and writes them until the step."""
        alone = [self._taken.take(i) for i in params if not self._specs[i].sparse]
        return all(alone) and not self.scale.enabled

    def _note_changes(self) -> None:
        """Gradients that were changed since an exchange took them: what was meant would be lost, or made in part."""
        if changed := self._taken.changed():
            self._verdict.note_fault(averaged_elsewhere(self.params) or CHANGED.format(self._specs[changed[0]].name))
        self._taken.forget()

    def _factors(self, grads: Sequence[Tensor]) -> list[float]:
        return self._policy.clipping.factors(entries(grads), 1 / self.scale.value, self._comm.size)

    def _correction(self, bucket: Bucket, factors: list[float], in_place: bool) -> Correction:
        groups = [self._group(i) for i in bucket.members]
        return Correction(
            factors,
            [float(group.get("momentum", 0.0)) for group in groups],
            [bool(group.get("nesterov", False)) for group in groups],
            in_place,
        )

    # -- the rest of the exchange -------------------------------------------------------------------------------------

    def finish(self, *, stepping: bool) -> bool:
        """Exchange what is left and write the averages into ``param.grad``, in unscaled units.

        Args:
            stepping: :meth:`step` follows at once.

        Returns:
            Whether the step is to be made; False where all ranks skip it. Nothing of a skipped step is kept.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together; nothing of the step is kept. Where averages are
                beyond float16, nothing is left either of what was kept back until then, and sent.
        """
        if self.timeline is not None:
            self.timeline.exchange()
        self._verdict.saw_gradient = self.backward.touched
        self._note_strangers()
        for finding in self._bad_rows():
            self._verdict.note_nonfinite(finding)
        made = self._finish_overlapped() if self._overlap else self._exchange_afterwards()
        self.backward.reset()
        self._taken.forget()
        self._open = False
        try:
            if made:
                self._unscale_rows(self.scale.value)
                self._check_halves()
            else:
                self._verdict.raise_or_skip()
                self.metrics.skipped_steps += 1
                self._overflow()
        except RingPruneError:
            if self.timeline is not None:
                self.timeline.again()
            raise
        finally:
            self._verdict.clear()
        if self.timeline is not None:
            (self.timeline.exchanged if made else self.timeline.again)()
        self._averages.written(watched=made and not stepping and self.metrics.density < 1)
        return made

    def _finish_overlapped(self) -> bool:
        """Buckets were started during backward; start the rest, decide, then finish or take the step back."""
        self._open_step()
        held, self._held = self._held, []
        for index in [*held, *self.backward.remaining()]:
            self._start(index, None)
        self._verdict.note_counted()
        self._note_changes()
        self.exchange.reduce(self._verdict.start)
        made = self._verdict.wait()
        if made:
            self._write_averages()
        else:
            self.exchange.abandon()
        return made

    def _exchange_afterwards(self) -> bool:
        """All gradients are there: decide first, then exchange."""
        self._open_step()
        everything = range(len(self.params))
        self._take(everything)  # before anything here lies in their memory too
        grads = self._gradients.of(everything)
        self._verdict.count(everything, ops.count_nonfinite(entries(grads)))
        self._verdict.note_counted()
        self._verdict.start()
        if not self._verdict.wait():
            self.metrics.exchanged()
            return False
        factors = self._factors(grads)
        for bucket in self.plan.buckets:
            self._start(bucket.index, factors)
        self.exchange.reduce()
        self._write_averages()
        return True

    def _write_averages(self) -> None:
        outputs = self._gradients.outputs()
        self.exchange.finish(outputs)
        for param, output in zip(self.params, outputs, strict=True):
            if param.grad is not output:
                param.grad = output

    def _check_halves(self) -> None:
        held = [(spec.name, param.grad) for spec, param in zip(self._specs, self.params, strict=True)]
        check_halves((name, entries([grad])[0]) for name, grad in held if grad is not None)

    def close(self, *, flushed: bool = False) -> None:
        """Stop watching the parameters. SGD has its momentum again, as far as that is the same on all ranks."""
        self._taken.forget()
        if self._momentum is not None:
            state = self.exchange.state() if flushed and self._all_keep else {}  # velocities are then their mean
            self._give_back({name: kinds["velocity"] for name, kinds in state.items() if "velocity" in kinds})
        super().close(flushed=flushed)

    def _overflow(self) -> None:
        """The step is not made: let a scaler see why on this rank too; rows stay as they are."""
        specs = zip(self.params, self._specs, strict=True)
        self.scale.overflow(param for param, spec in specs if not spec.sparse)

    # -- steps of the wrapped optimizer -------------------------------------------------------------------------------

    @property
    def thrown_away(self) -> bool:
        """Whether the averages of a step that was to be made are there no more; alike on all ranks.

        Only dense parameters tell: these have one on every rank, also on one without a batch.
        """
        dense = [param for param, spec in zip(self.params, self._specs, strict=True) if not spec.sparse]
        return bool(dense) and all(param.grad is None for param in dense)

    def note_misuse(self, exchange: bool, inside_scaler: bool, *, unscaled: bool) -> bool:
        """Whether ``step()`` cannot work as it was called; others may be in the exchange, so all ranks raise there.

        Args:
            exchange: it is to exchange.
            inside_scaler: ``GradScaler.step`` has called it.
            unscaled: gradients were unscaled before.
        """
        fault = None
        if inside_scaler and not self.scale.enabled:
            fault = "GradScaler.step() was called with an optimizer that was built without scaler=: pass it"
        elif exchange and unscaled:
            fault = "scaler.unscale_() before the exchange: call optimizer.synchronize() before it"
        elif not exchange and self.backward.touched:
            fault = "step() inside skip_synchronize() needs a synchronize() after backward()"
        if fault is not None:
            self.note_fault(fault)
        return fault is not None

    @torch.inference_mode(False)
    def step(self) -> None:
        """Let the wrapped optimizer step on the averages."""
        self._stepped()
        self._averages.used(tell=self._comm.rank == 0)
        if self._momentum is not None:
            if self.timeline is not None:
                self.timeline.exchange()
            self._momentum.apply()
            if self.timeline is not None:
                self.timeline.exchanged()
        try:
            self._inner_step()
        except Exception as error:
            try:
                self._together()  # the others go on, and would wait for this rank
            except RingPruneError as told:  # all ranks raise it
                raise told from error
            raise
        self._together()

    def _together(self) -> None:
        """What all ranks do after a step, also one that has failed here."""
        self._compare("parameter", self._in_pieces(self.params))
        self.exchange.look_ahead()

    def _inner_step(self) -> None:
        for param in (param for group in self._inner.param_groups for param in group["params"]):
            if param.grad is not None and not param.is_contiguous():
                param.grad = laid_out_as(param, param.grad)
        with self._told_to_all(), nullcontext() if self._momentum is None else self._momentum.taken_over():
            self._inner.step()

    def initialise(self) -> None:
        """Create the wrapped optimizer's state; one that wants sparse gradients gets empty ones."""
        for param, spec in zip(self.params, self._specs, strict=True):
            if spec.sparse:
                param.grad = no_rows(param)
        super().initialise()

    def time(self, timeline: Timeline | None) -> None:
        """Note in ``timeline`` when things happen from the next step on; None stops that."""
        self.timeline = timeline
        self.backward.ready = None if timeline is None else timeline.ready

    def velocities(self) -> dict[str, Tensor]:
        """What :meth:`hand_over` needs; all ranks call this."""
        return {} if self._momentum is None else self.exchange.velocities()

    def hand_over(self, velocities: Mapping[str, Tensor]) -> None:
        """Close, and let go of all state, after an exchange that sent everything as it is.

        Args:
            velocities: by name, their mean over the ranks: with what is the same on all, momentum of the wrapped
                optimizer again.
        """
        if self._momentum is not None:
            self._give_back(velocities)
        self.metrics.divide_anew(self.exchange.accounts.bytes_by_parameter())
        self.close()

    def _give_back(self, velocities: Mapping[str, Tensor]) -> None:
        assert self._momentum is not None, "what was not taken over is not given back"
        if not self._average:  # SGD's momentum is then one of sums
            for velocity in velocities.values():
                velocity.mul_(self._comm.size)
        self._momentum.give_back(velocities)

    def take_over(self) -> None:
        """Make the momentum that the wrapped optimizer has ours at once, and not at the next step."""
        if self._momentum is not None:
            self._momentum.adopt()

    @torch.inference_mode(False)
    def flush(self) -> None:
        """Send all residuals, whole, and step on them; parameters that keep nothing back stay as they are.

        Raises:
            UsageError: an exchange is under way, or the step would be one of learning rate 0.
        """
        self.idle("flush()")
        keeps = self._keeps_back()
        groups = self._inner.param_groups
        kept_of = {spec.group for spec, kept in zip(self._specs, keeps, strict=True) if kept}
        if any(groups[i].get("lr") == 0 for i in kept_of):
            lost = "flush() at learning rate 0 would lose what was held back: call it before a rate is 0"
            raise UsageError(f"{lost}. Where the schedule has ended, leave it out: all ranks have the same weights")
        if self._comm.rank == 0:
            tell_of_rates([groups[i] for i in kept_of], [self._highest.get(i, 0.0) for i in kept_of])
        for kept, param in zip(keeps, self.params, strict=True):
            param.grad = torch.zeros_like(param, memory_format=torch.contiguous_format) if kept else None
        exchanged = {id(param) for param in self.params}
        for param in (param for group in groups for param in group["params"] if id(param) not in exchanged):
            param.grad = None  # rows of the step before, which was made; or of one that was unfrozen, each rank's own
        self.exchange.flush(self._in_pieces([param if param.grad is None else param.grad for param in self.params]))
        try:
            self._check_halves()
        except NonFiniteGradientError as error:
            self._inner.zero_grad(set_to_none=True)
            raise NonFiniteGradientError(f"{error}. What was kept back until this flush is gone") from None
        self._inner_step()
        self._inner.zero_grad(set_to_none=True)

    def _keeps_back(self) -> list[bool]:
        """For each parameter, whether a flush makes a step on what is kept back of it."""
        return self.exchange.keeps()

    def _in_pieces(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters' tensors, as the Plan has them."""
        return tensors

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """The parameters are always those that all ranks share."""
        yield

    def state_like(self, saved: Mapping[str, Mapping[str, Tensor]], *, make: bool) -> dict[str, dict[str, Tensor]]:
        """:meth:`state`, with momentum for just those packed parameters that have it in a checkpoint; new is zero."""
        state = super().state()
        with_momentum = {name for name, kinds in saved.items() if "momentum" in kinds}
        momentum = {} if self._momentum is None else self._momentum.state_like(with_momentum, make=make)
        for name, buffer in momentum.items():
            state.setdefault(name, {})["momentum"] = buffer
        return state

    def resumed(self, saved: Mapping[str, Mapping[str, Tensor]], origin: Origin) -> None:
        """The state was overwritten from the checkpoint that ``origin`` tells about."""
        if not self._average and origin.size != self._comm.size:
            divide_sums(self.exchange.state(), origin.size, self._comm.size)
        super().resumed(saved, origin)
        if self._momentum is not None:
            self._momentum.resumed({name for name, kinds in saved.items() if "momentum" in kinds}, origin.step)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a checkpoint must hold besides the wrapped optimizer's state, as views by parameter name."""
        state = super().state()
        if self._momentum is not None:
            for name, buffer in self._momentum.state().items():
                state.setdefault(name, {})["momentum"] = buffer
        return state
