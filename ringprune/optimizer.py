"""DistributedOptimizer: wraps a torch optimizer and exchanges gradients before its step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringprune import arguments, checkpoint, from_horovod, sharded_state, sharing, wire
from ringprune.auto import Auto, Pilot, as_choice
from ringprune.comm.communicator import Communicator
from ringprune.errors import RingPruneError, UsageError
from ringprune.gradient_mode import GradientMode
from ringprune.greeting import Greeting
from ringprune.guard import Guard
from ringprune.parts import Parts, Settings
from ringprune.planning import check_schedule, make_mode, make_plan, sparse_parameters, takes_groups
from ringprune.policies import Policy, check_abilities
from ringprune.scaling import LossScale
from ringprune.update_mode import UpdateMode
from ringprune.validation import flag, whole_number

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(sharing.Sharer):
    """A torch optimizer whose gradients are averaged over all ranks, under a policy, before its step.

    Used like ``hvd.DistributedOptimizer``. Param groups, state and defaults are the wrapped optimizer's own, so
    learning-rate schedulers work on either. Exchanges start during backward, as buckets of gradients fill. With
    ``local_steps`` what weights moved by is exchanged instead; overflows, NaN and clipping are then each rank's own.

    All ranks construct it, and call :meth:`step`, :meth:`synchronize` and :meth:`flush`, together.

    Args:
        optimizer: the optimizer to wrap. Plain ``torch.optim.SGD`` with momentum gets momentum correction if the policy
            asks for it; any other keeps its own state and gets error feedback.
        named_parameters: ``model.named_parameters()``; None numbers them.
        policy: one, or its name: ``"iwp"`` is :func:`ringprune.recommended`, ``"auto"`` picks one. None: ``IWP()``.
        comm: a communicator, the name of one, or None for :func:`ringprune.connect`'s default: Horovod if initialised,
            else torch.distributed if initialised, else MPI. On ranks outside its group the wrapper only steps.
        backward_passes_per_step: backward passes that are accumulated before an exchange.
        scaler: the loop's ``torch.amp.GradScaler``; an overflow on any rank then skips the step on all.
        model: the model: for BatchNorm statistics (``local_steps``), hooks (a schedule), sparse modules (``rows``).
        seed: decides roots and exploration; the same on all ranks.
        nonfinite: what NaN or infinity in a gradient of any rank leads to, on all ranks: ``"raise"`` (the default
            without a scaler) or ``"skip"`` the step (the default with one). Nothing of that step is kept.
        hierarchical: sum dense inside each node, and exchange between nodes only, by the first rank of each. Residuals,
            selection and bytes sent are then a node's, not a rank's.
        overlap: start exchanges during backward. It keeps a second copy of residual and velocity, so that a step can be
            taken back; False halves that memory and exchanges after backward.
        bucket_bytes: size of a bucket, as float32. Over Horovod, which gathers tensors itself, dense ones are smaller.
        check_every: compare hashes of all parameters and index sets between the ranks after every so many exchanges; a
            difference raises RankMismatchError on all ranks. 0 is never.
        guard: a :class:`ringprune.Guard`, to send tensors whole whose residuals grow without bound; None for none.
        op: ``hvd.Average`` (default), ``hvd.Sum``, or ``"average"``, ``"sum"``.
        compression, groups, num_groups: Horovod's; only ``Compression.none``: policy and buckets decide what is sent.
        process_set: a Horovod process set; on ranks outside it the wrapper only steps.
        sparse_as_dense: Horovod's; sparse gradients are made dense, unless ``rows`` or local steps take them.
        gradient_predivide_factor: Horovod's; part of the division that happens before the sum.

    Raises:
        ConfigurationError, ArgumentTypeError, DependencyError: an argument cannot work, or what it needs is missing.
        RankMismatchError, UsageError: ranks built different things, as all hear; one alone that should not be.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor  # set by GradScaler.step while it lasts, with grad_scale

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *positional: NoReturn,
        policy: Policy | Auto | str | None = None,
        comm: Communicator | str | None = None,
        backward_passes_per_step: int = 1,
        scaler: Any = None,
        model: torch.nn.Module | None = None,
        seed: int = 0,
        nonfinite: str | None = None,
        hierarchical: bool = False,
        overlap: bool = True,
        bucket_bytes: int = 25 << 20,
        check_every: int = 0,
        guard: Guard | None = None,
        op: Any = None,
        compression: Any = None,
        groups: Any = None,
        num_groups: int = 0,
        process_set: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        **unknown: NoReturn,
    ) -> None:
        outside = from_horovod.is_outside(process_set)
        if not outside:
            self._comm = arguments.communicator(comm, process_set)
            self._own_comm = comm is None or isinstance(comm, str)
            greeting, outside = Greeting(self._comm), self._comm.size == 0
        with nullcontext() if outside else greeting.told():
            arguments.refuse_unknown(positional, unknown, DistributedOptimizer)
            chosen, auto = as_choice(policy, optimizer, {"hierarchical=True": hierarchical, "guard": guard is not None})
            self._inner = arguments.check_optimizer(optimizer, chosen)
            super().__init__(optimizer.param_groups, optimizer.defaults)
            sharing.follow(optimizer, self)
            self._should_synchronize = True
            self._synchronized = self._skipped = self._scaled = self._flushed = self._closed = False
            self._mode: GradientMode | UpdateMode | None = None
            self._last: dict[str, Any] = {}  # statistics, of one that was closed
            self._pilot: Pilot | None = None
            if outside:
                self._step_supports_amp_scaling = False  # a GradScaler unscales and skips itself, as with any optimizer
                return
            greeting.lives_with(self.param_groups)
            scale = LossScale(scaler, greeting.device)
            horovods = (op, compression, groups, num_groups, sparse_as_dense, gradient_predivide_factor)
            settings = Settings(
                seed=whole_number("seed", seed, 0),
                passes=whole_number("backward_passes_per_step", backward_passes_per_step, 1),
                nonfinite=("skip" if scale.enabled else "raise") if nonfinite is None else nonfinite,
                overlap=flag("overlap", overlap),
                mean=from_horovod.mean_of(*horovods),
                check_every=whole_number("check_every", check_every, 0),
                guard=arguments.check_guard(guard, chosen),
            )
            statistics = arguments.statistics(model)
            check_abilities(chosen, self._comm)
            named = arguments.name_parameters(optimizer, named_parameters)
            trained, embeddings = arguments.divide_parameters(named)
            specs = arguments.describe_parameters(trained, sparse_parameters(chosen, model, optimizer, hierarchical))
            shared = [str(auto or chosen), str(settings), str(scale), *arguments.describe(optimizer, statistics)]
            limit = whole_number("bucket_bytes", bucket_bytes, 1, 4 * wire.MAX_POSITIONS)
            params = [param for _, param, _ in trained]
            refused = {"scaler": scale.enabled, "guard": guard is not None, "hierarchical=True": hierarchical}
            check_schedule(chosen, model, named, refused | {'nonfinite="skip"': settings.nonfinite == "skip"})
            groups = takes_groups(self._comm, hierarchical=hierarchical, scaled=scale.enabled)
            plan, sliced = make_plan(chosen, specs, params, limit, shared, groups=groups)
            first_fact = f"hierarchical={flag('hierarchical', hierarchical)}"
        if hierarchical:
            # To divide the ranks is collective: not before all of them have come this far, and want it.
            greeting.check([first_fact, "ranks to be divided by node"])
        with greeting.told():
            nodes = arguments.divide(self._comm, chosen, params) if hierarchical else None
            self._keepers = self._comm.size if nodes is None else nodes.count  # ranks that may keep something back
            if self._comm.rank == 0:
                arguments.advise(optimizer, chosen, self._comm, model, given=policy)
            more = (nodes, sliced, model, embeddings)
            parts = Parts(optimizer, params, plan, chosen, self._comm, scale, settings, *more)
            self._pilot = None if auto is None else Pilot.of(self, auto, parts, limit)
            self._mode = make_mode(parts, statistics) if self._pilot is None else self._pilot.mode
        try:
            greeting.check([first_fact, f"wire format {wire.WIRE_VERSION}", *plan.facts])
        except RingPruneError:
            self.close()
            raise

    def _active(self) -> GradientMode | UpdateMode | None:
        """What exchanges; None on ranks outside the process set.

        Raises:
            UsageError: the wrapper was closed.
        """
        if self._closed:
            raise UsageError("this DistributedOptimizer was closed")
        return self._mode

    @torch._disable_dynamo  # type: ignore[attr-defined]  # private; torch.compile, of a whole loop, fails on what is here
    def synchronize(self) -> None:
        """Finish the exchange: afterwards every ``param.grad`` holds the average, the same on all ranks.

        With a scaler gradients come back multiplied by the scale, as with Horovod, so that ``scaler.unscale_`` follows.
        With ``local_steps`` it does nothing: gradients stay each rank's own. With a schedule, after :meth:`step`, it
        makes what is left of the step: before parameters are read outside the forward pass.

        Raises:
            NonFiniteGradientError, UsageError, RankMismatchError, CommunicatorError: on all ranks together.
        """
        mode = self._active()
        if isinstance(mode, GradientMode) and not mode.settle():
            self._finish(mode, stepping=False)
            if mode.scale.enabled and not self._skipped:
                mode.scale.multiply(mode.updated, mode.scale.value)
                self._scaled = True

    def _forget_exchange(self) -> None:
        """No averages are there that a step could be made on."""
        self._synchronized = self._skipped = self._scaled = False

    def _finish(self, mode: GradientMode, *, stepping: bool) -> None:
        self._forget_exchange()
        before, self._skipped = mode.exchange.step, True
        try:
            self._skipped = not mode.finish(stepping=stepping)
        finally:  # nothing is kept of an exchange that was not made
            self._flushed &= self._skipped and mode.exchange.step == before
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, :meth:`step` uses the gradients as they are: for a step after an explicit :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as synchronize()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients, unless :meth:`synchronize` has, and let the wrapped optimizer step.

        With ``local_steps=H`` it steps on this rank's gradients; every H-th call exchanges what weights have moved by.

        Args:
            closure: recomputes the loss, which is returned, and its gradients; called once, before the exchange.

        Raises:
            NonFiniteGradientError, UsageError, RankMismatchError, CommunicatorError: on all ranks together.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        mode = self._active()
        if mode is None:
            self._inner.step()
        elif not mode.backward.touched and from_horovod.called_by_broadcast():
            mode.initialise()
        else:
            sharing.share(self._inner, self)  # load_state_dict() of the wrapped optimizer gives it new groups
            try:
                with mode.scale.inside(self):
                    if isinstance(mode, GradientMode):
                        self._step(mode)
                    else:
                        self._step_locally(mode)
            finally:
                self._forget_exchange()
        return loss

    def _step(self, mode: GradientMode) -> None:
        # GradScaler.step leaves the scale in this attribute; None where unscale_() was called before.
        inside_scaler, pending_scale = hasattr(self, "grad_scale"), getattr(self, "grad_scale", 1.0)
        averaged = self._synchronized and (self._skipped or not mode.thrown_away)
        exchange = self._should_synchronize and (mode.backward.touched or not averaged)
        misused = mode.note_misuse(exchange, inside_scaler, unscaled=pending_scale is None)
        if exchange or misused:
            self._finish(mode, stepping=True)
        elif inside_scaler and self.found_inf and not self._skipped:
            self._skipped = True  # what the scaler saw is the average, the same on all ranks
            mode.metrics.skipped_steps += 1
        if not self._skipped:
            if self._scaled and pending_scale is not None:
                mode.scale.multiply(mode.updated, 1 / mode.scale.value)
            try:
                mode.step()
            except Exception as error:
                self._mode = mode if self._pilot is None else self._pilot.failed(error)
                raise
            self._mode = mode if self._pilot is None else self._pilot.stepped()
        elif inside_scaler:
            mode.scale.tell(self)

    def _step_locally(self, mode: UpdateMode) -> None:
        self._flushed = False
        scale = getattr(self, "grad_scale", None)  # GradScaler.step leaves it here, as in _step
        overflow = hasattr(self, "grad_scale") and bool(self.found_inf)
        mode.step(1.0 if scale is None else float(scale), overflow=overflow)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Context in which the parameters are those that all ranks share; for evaluation between exchanges.

        With ``local_steps`` they are the weights, and the BatchNorm statistics, of the last exchange; afterwards this
        rank's own are back. Otherwise they are that at any time.

        Raises:
            UsageError: inside another one, as :meth:`step` is there.
        """
        return nullcontext() if (mode := self._active()) is None else mode.shared_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; with ``local_steps`` a backward pass can so be thrown away.

        Raises:
            UsageError: an exchange of them is under way.
        """
        if isinstance(self._mode, UpdateMode):
            self._mode.backward.reset()
        elif self._mode is not None:
            self._mode.idle("zero_grad()")
        self._forget_exchange()
        self._inner.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before an exchange; between steps, alike on all ranks."""
        mode = self._active()
        if mode is not None:
            mode.idle("set_backward_passes_per_step()")
            mode.backward.passes = whole_number("passes", passes, 1)
            mode.backward.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy would have neither hooks nor communicator."""
        raise UsageError("a DistributedOptimizer is neither copied nor pickled: save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the ranks have agreed on what they exchange."""
        if hasattr(self, "_mode"):
            raise UsageError("add_param_group() after wrapping: add it to the plain optimizer, then wrap")
        super().add_param_group(param_group)

    def stats(self) -> dict[str, Any]:
        """Steps, bytes by content, ratios, densities and seconds per stage, as plain numbers (see metrics.py)."""
        chosen = {} if self._pilot is None else {"auto": self._pilot.stats()}
        return self._last if self._mode is None else self._mode.stats() | chosen

    def flush(self) -> None:
        """Send what all ranks have kept back, whole, and step on it; all ranks call this between steps.

        Afterwards residuals are zero, velocities their mean, and a checkpoint of any rank (with ``hierarchical`` of a
        node's first) serves any number of ranks. Before evaluation it puts into the model what training has held back.

        It is one more step of the wrapped optimizer, at its learning rate, on what was held back; right after another
        one it does nothing. With ``local_steps`` it is an exchange of everything; what the optimizer has stays its own.

        Raises:
            UsageError: between backward and step, or at learning rate 0, where what was held back would be lost.
        """
        mode = self._active()
        if mode is not None:
            mode.idle("flush()")
            if not self._flushed or isinstance(mode, UpdateMode):  # there other ranks may have made steps
                mode.flush()
            self._flushed = True

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"ringprune"`` what this rank keeps; save it on every rank."""
        mode = self._active()
        if mode is not None:
            mode.prepare_saving(for_horovod=from_horovod.called_by_broadcast())
        state = sharded_state.save(self._inner)
        if mode is not None:
            flushed = self._flushed or not mode.keeps_something()
            origin = checkpoint.Origin(self._comm.rank, self._comm.size, self._keepers, flushed=flushed, **mode.made())
            state["ringprune"] = checkpoint.save(origin, mode.state(), state)
            if self._pilot is not None:
                state["ringprune"]["auto"] = self._pilot.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; all ranks together, each from its own unless it was saved after a flush.

        With ``local_steps`` it holds the weights too, each rank's own, and overwrites the parameters.

        Raises:
            CheckpointError, or ValueError from the wrapped optimizer: it does not fit; nothing was changed.
            UsageError: between backward and step.
        """
        mode = self._active()
        inner = {key: value for key, value in state_dict.items() if key != "ringprune"}
        if mode is None:
            sharded_state.load(self._inner, inner)
        else:
            alike, known = self._keepers == self._comm.size, (self._comm.rank, self._comm.size, self._keepers)
            with nullcontext() if alike else checkpoint.refused_together(self._comm, mode.metrics):
                mode.settle()
                mode.idle("load_state_dict()")
                origin, entries = checkpoint.opened(state_dict.get("ringprune"), *known, keeps=mode.keeps)
                if self._pilot is None:
                    checkpoint.check_tensors(entries, mode.state_like(entries, make=False), state_dict)

            def load(mode: GradientMode | UpdateMode) -> None:
                checkpoint.check_tensors(entries, mode.state_like(entries, make=False), state_dict)
                sharded_state.load(self._inner, inner)

            if self._pilot is None:
                sharded_state.load(self._inner, inner)
            else:
                mode = self._mode = self._pilot.resume(state_dict["ringprune"].get("auto", {}), load)
        sharing.share(self._inner, self)
        self._forget_exchange()
        if mode is not None:
            checkpoint.copy(entries, mode.state_like(entries, make=True))
            mode.resumed(entries, origin)
            self._flushed = origin.flushed

    def close(self) -> None:
        """Remove the hooks from the parameters, so that the model can be wrapped again; this wrapper is done.

        What was kept back is gone: :meth:`flush` first. SGD has its momentum again, after a flush all of it (without
        ``hierarchical``). With ``lookahead`` all ranks call it, between steps.
        """
        mode, self._closed = self._mode, True
        if mode is None:
            return
        try:
            mode.settle()
        finally:
            self._last, self._mode = self.stats(), None
            mode.close(flushed=self._flushed)
            arguments.leave(self._comm, mode.nodes, own=self._own_comm)
