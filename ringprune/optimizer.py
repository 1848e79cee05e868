"""DistributedOptimizer: wraps a torch optimizer and exchanges gradients before its step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune import arguments, checkpoint, momentum, ops, wire
from ringprune.backward import Backward
from ringprune.comm import connect
from ringprune.comm.communicator import Communicator
from ringprune.errors import ArgumentTypeError, ConfigurationError, RingPruneError, UsageError
from ringprune.exchange import Exchange
from ringprune.metrics import Metrics
from ringprune.plan import Bucket, ParamSpec, Plan, build_plan, shake_hands
from ringprune.policies import Policy, as_policy
from ringprune.residual import Correction
from ringprune.scaling import LossScale
from ringprune.verdict import Verdict

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose gradients are averaged over all ranks, under a policy, before its step.

    Used like ``hvd.DistributedOptimizer``. Param groups, state and defaults are the wrapped optimizer's own, so
    learning-rate schedulers work on either. Exchanges start during backward, as buckets of gradients fill.

    All ranks construct it, and call :meth:`step`, :meth:`synchronize` and :meth:`flush`, together.

    Args:
        optimizer: the optimizer to wrap. Plain ``torch.optim.SGD`` with momentum gets momentum correction if the policy
            asks for it; any other keeps its own state and gets error feedback.
        named_parameters: ``model.named_parameters()``; None numbers them.
        policy: a policy, or its name with its defaults.
        comm: a communicator, the name of one, or None: Horovod if initialised, otherwise MPI.
        backward_passes_per_step: backward passes that are accumulated before an exchange.
        scaler: the loop's ``torch.amp.GradScaler``; an overflow on any rank then skips the step on all.
        model: the model; only for policies that schedule its forward pass.
        seed: decides roots and exploration; the same on all ranks.
        nonfinite: what NaN or infinity in a gradient of any rank leads to, on all ranks: ``"raise"`` (the default
            without a scaler) or ``"skip"`` the step (the default with one). Nothing of that step is kept.
        overlap: start exchanges during backward. It keeps a second copy of residual and velocity, so that a step can be
            taken back; False halves that memory and exchanges after backward.
        bucket_bytes: size of a bucket, as float32.
        op: ``hvd.Average`` (default), ``hvd.Sum``, or ``"average"``, ``"sum"``.
        compression: Horovod's; only ``hvd.Compression.none``, since the policy decides what is sent.
        groups: Horovod's; refused, buckets take their place.
        process_set: a Horovod process set; on ranks outside it the wrapper only steps.
        sparse_as_dense: Horovod's; sparse gradients are made dense either way.
        gradient_predivide_factor: Horovod's; part of the division that happens before the sum.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument cannot work.
        RankMismatchError: on all ranks, when they built different models, policies or seeds.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        policy: Policy | str = "iwp",
        comm: Communicator | str | None = None,
        backward_passes_per_step: int = 1,
        scaler: Any = None,
        model: torch.nn.Module | None = None,
        seed: int = 0,
        nonfinite: str | None = None,
        overlap: bool = True,
        bucket_bytes: int = 25 << 20,
        op: Any = None,
        compression: Any = None,
        groups: Any = None,
        process_set: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
    ) -> None:
        self._inner = arguments.check_optimizer(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        self._synchronized, self._skipped, self._flushed, self._started = False, False, False, False
        self._should_synchronize, self._grads_scaled = True, False
        self._backward: Backward | None = None
        if process_set is not None and not process_set.included():
            return
        self._comm = _communicator(comm, process_set)
        facts, failure = ["nothing"], None
        try:
            if model is not None and not isinstance(model, torch.nn.Module):
                raise ArgumentTypeError(f"model={model!r}: a torch.nn.Module, or None")
            self._policy = as_policy(policy)
            named = arguments.name_parameters(optimizer, named_parameters)
            self._mean = arguments.horovod_arguments(
                op, compression, groups, sparse_as_dense, gradient_predivide_factor
            )
            self._scale = LossScale(scaler)
            nonfinite = nonfinite or ("skip" if self._scale.enabled else "raise")
            passes = arguments.whole_number("backward_passes_per_step", backward_passes_per_step, 1)
            seed = arguments.whole_number("seed", seed, 0)
            trained = [(name, param, group) for name, param, group in named if param.requires_grad]
            self._params: list[Tensor] = [param for _, param, _ in trained]
            self._plan = self._make_plan(trained, bucket_bytes, seed, passes, nonfinite, overlap)
            self._overlap = overlap and self._policy.clipping.norm is None
            self._build(seed, passes, nonfinite)
            facts = list(self._plan.facts)
        except RingPruneError as error:
            failure = str(error)
            raise
        finally:
            # A rank that fails here tells the others, who would wait for it otherwise.
            self._shake_hands(facts, failure)

    def _make_plan(
        self,
        trained: Sequence[tuple[str, Tensor, int]],
        bucket_bytes: int,
        seed: int,
        passes: int,
        nonfinite: str,
        overlap: bool,
    ) -> Plan:
        arguments.whole_number("bucket_bytes", bucket_bytes, 1)
        specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.device, group) for name, p, group in trained]
        for spec in specs:
            if not spec.dtype.is_floating_point:
                raise ConfigurationError(f"parameter {spec}: a floating-point parameter")
            if spec.numel > wire.MAX_POSITIONS:
                raise ConfigurationError(f"parameter {spec}: at most {wire.MAX_POSITIONS} entries")
        missing = self._policy.needs - self._comm.abilities
        if missing:
            raise ConfigurationError(
                f"policy {self._policy.name!r} needs {', '.join(sorted(missing))}, which the {self._comm.kind} "
                "communicator cannot do"
            )
        facts = [
            f"wire format {wire.WIRE_VERSION}",
            f"{self._policy}",
            f"seed {seed}",
            f"{self._mean}",
            f"{passes} backward passes per step, nonfinite={nonfinite!r}, overlap={overlap}",
            f"loss scaling {'on' if self._scale.enabled else 'off'}",
            *arguments.describe_optimizer(self._inner),
        ]
        return build_plan(specs, [self._policy.routing.packed(spec) for spec in specs], bucket_bytes, facts)

    def _build(self, seed: int, passes: int, nonfinite: str) -> None:
        """Make everything that holds state."""
        specs, device = self._plan.params, self._device()
        takes_over = self._policy.momentum_correction and momentum.takes_over(self._inner)
        packed = [self._policy.routing.packed(spec) for spec in specs]
        self._momentum = momentum.SharedMomentum(self._inner, self._params, specs, packed) if takes_over else None
        self._metrics = Metrics(self._comm.traffic, self._plan.numel)
        self._verdict = Verdict(self._comm, self._metrics, device, nonfinite)
        self._exchange = Exchange(
            self._plan,
            self._policy,
            self._comm,
            self._metrics,
            self._params,
            seed=seed,
            mean=self._mean,
            velocity=takes_over,
            spare=self._overlap,
        )
        self._backward = Backward(self._plan, self._params, passes, full=self._bucket_full, excess=self._excess)

    def _device(self) -> torch.device:
        return self._params[0].device if self._params else torch.device("cpu")

    def _shake_hands(self, facts: Sequence[str], failure: str | None) -> None:
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        try:
            shake_hands(facts, self._comm, device, failure)
        except RingPruneError:
            self.close()
            if failure is None:
                raise

    def _share(self) -> None:
        """Param groups, state and defaults are the wrapped optimizer's own objects."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.defaults = self._inner.defaults

    # -- during backward ----------------------------------------------------------------------------------------------

    def _bucket_full(self, index: int) -> None:
        if self._overlap:
            self._start_bucket(index, None)

    def _excess(self, name: str) -> None:
        assert self._backward is not None
        self._verdict.note_fault(
            f"parameter {name!r} got more gradients than backward_passes_per_step={self._backward.passes} before step(); "
            "raise it to accumulate over more backward passes"
        )

    def _open_step(self) -> None:
        """Before the first bucket of a step is started."""
        if not self._started:
            self._started, self._flushed = True, False
            self._scale.read()
            self._exchange.begin()

    def _start_bucket(self, index: int, factors: Sequence[float] | None) -> None:
        """Stages 1 to 4 of a bucket; ``factors`` per parameter of the plan where clipping needed all gradients."""
        self._open_step()
        bucket = self._plan.buckets[index]
        grads = self._gradients(bucket.members)
        if factors is None:
            self._note_nonfinite(bucket.members, grads)
            own = self._policy.clipping.factors(grads, 1 / self._scale.value, self._comm.size)
        else:
            own = [factors[i] for i in bucket.members]
        self._exchange.start(index, grads, self._correction(bucket, own))

    def _correction(self, bucket: Bucket, factors: list[float]) -> Correction:
        groups = [self.param_groups[self._plan.params[i].group] for i in bucket.members]
        return Correction(
            factors,
            [float(group.get("momentum", 0.0)) for group in groups],
            [bool(group.get("nesterov", False)) for group in groups],
        )

    def _gradients(self, members: Sequence[int]) -> list[Tensor]:
        """The gradients to exchange, dense and contiguous; zeros where this rank has none, as with Horovod."""
        grads = []
        for param in (self._params[i] for i in members):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.is_sparse:
                param.grad = param.grad.to_dense()
            grads.append(param.grad.detach().contiguous())
        return grads

    def _note_nonfinite(self, members: Sequence[int], grads: Sequence[Tensor]) -> None:
        for member, count in zip(members, ops.count_nonfinite(grads).tolist(), strict=True):
            if count:
                spec = self._plan.params[member]
                self._verdict.note_nonfinite(
                    f"the gradient of {spec.name!r} has {count} of {spec.numel} entries NaN or infinite"
                )

    # -- the exchange -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Finish the exchange: afterwards every ``param.grad`` holds the average, the same on all ranks.

        With a scaler gradients come back multiplied by the scale, as with Horovod, so that ``scaler.unscale_`` follows.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together.
        """
        self._synchronize(stepping=False)

    def _synchronize(self, *, stepping: bool) -> None:
        backward = self._open_backward()
        if backward is None:
            return
        self._verdict.saw_gradient = backward.touched
        made = self._exchange_overlapped(backward) if self._overlap else self._exchange_afterwards()
        backward.reset()
        self._started = False
        self._synchronized, self._skipped = True, not made
        if not made:
            self._scale.overflow(self, self._params, stepping=stepping)
            self._metrics.skipped_steps += 1
        try:
            if not made:
                self._verdict.raise_or_skip()
        except RingPruneError:
            self._synchronized = self._skipped = False
            raise
        finally:
            self._verdict.clear()
        self._grads_scaled = self._scale.enabled and not stepping
        if made and self._grads_scaled:
            self._scale.multiply(self._params, self._scale.value)

    def _exchange_overlapped(self, backward: Backward) -> bool:
        """Buckets were started during backward; start the rest, decide, and finish or take the step back."""
        self._open_step()
        for index in backward.remaining():
            self._start_bucket(index, None)
        self._verdict.start()
        self._exchange.reduce()
        made = self._verdict.wait()
        if made:
            self._finish()
        else:
            self._exchange.abandon()
        return made

    def _exchange_afterwards(self) -> bool:
        """All gradients are there: decide first, then exchange."""
        self._open_step()
        everything = range(len(self._params))
        grads = self._gradients(everything)
        self._note_nonfinite(everything, grads)
        self._verdict.start()
        if not self._verdict.wait():
            return False
        factors = self._policy.clipping.factors(grads, 1 / self._scale.value, self._comm.size)
        for bucket in self._plan.buckets:
            self._start_bucket(bucket.index, factors)
        self._exchange.reduce()
        self._finish()
        return True

    def _finish(self) -> None:
        outputs = []
        for param in self._params:
            assert param.grad is not None
            direct = param.grad.is_contiguous() and param.grad.dtype == param.dtype and not param.grad.requires_grad
            outputs.append(param.grad if direct else torch.empty(param.shape, dtype=param.dtype, device=param.device))
        self._exchange.finish(outputs)
        for param, output in zip(self._params, outputs, strict=True):
            if param.grad is not output:
                param.grad = output

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, :meth:`step` uses the gradients as they are: for a step after an explicit :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    # -- torch's methods ----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange gradients, unless :meth:`synchronize` has, and let the wrapped optimizer step.

        Args:
            closure: recomputes the loss and its gradients; called once, before the exchange.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inside_scaler = hasattr(self, "grad_scale")
        if self._backward is None:
            self._inner_step()
            return loss
        if inside_scaler and not self._scale.enabled:
            raise UsageError("GradScaler.step() was called with an optimizer that was built without scaler=: pass it")
        if self._initialising():
            self._inner.step()
            return loss
        if self._should_synchronize and not self._synchronized:
            self._synchronize(stepping=inside_scaler)
        elif self._backward.touched:
            raise UsageError("step() inside skip_synchronize() needs a synchronize() after backward()")
        if not self._skipped:
            if self._grads_scaled and getattr(self, "grad_scale", 1.0) is not None:
                self._scale.multiply(self._params, 1 / self._scale.value)
            self._inner_step()
        self._synchronized = self._skipped = self._grads_scaled = False
        return loss

    def _inner_step(self) -> None:
        if self._backward is None:
            self._inner.step()
            return
        self._metrics.steps += 1
        if self._momentum is None:
            self._inner.step()
            return
        self._momentum.apply()
        with self._momentum.taken_over():
            self._inner.step()

    def _initialising(self) -> bool:
        """Whether this is the step on zero gradients with which ``hvd.broadcast_optimizer_state`` creates state.

        Only some ranks may make it, so it must not wait for the others.
        """
        assert self._backward is not None
        if self._backward.touched or self._exchange.step or self._inner.state or not self._params:
            return False
        return all(param.grad is not None and not param.grad.any() for param in self._params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            UsageError: an exchange of them is under way.
        """
        if self._backward is not None and self._backward.touched:
            raise UsageError("zero_grad() after backward() and before step() or synchronize(): an exchange is under way")
        self._inner.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before an exchange; between steps, alike on all ranks."""
        backward = self._open_backward()
        if backward is not None:
            if backward.touched:
                raise UsageError("set_backward_passes_per_step() between backward() and step()")
            backward.passes = arguments.whole_number("passes", passes, 1)
            backward.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the ranks have agreed on what they exchange."""
        if hasattr(self, "_started"):
            raise UsageError("add_param_group() after wrapping: add it to the plain optimizer, then wrap")
        super().add_param_group(param_group)

    # -- what users ask of it -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Steps, bytes by content, ratios, densities and seconds per stage, as plain numbers (see metrics.py)."""
        return {} if self._backward is None else self._metrics.stats()

    def flush(self) -> None:
        """Send what all ranks have kept back, whole, and step on it; all ranks call this between steps.

        Afterwards nothing is private to a rank: residuals are zero, velocities their mean, and a checkpoint of any
        rank serves any number of ranks. Before evaluation it puts into the model what training has held back.

        Raises:
            UsageError: between backward and step.
        """
        backward = self._open_backward()
        if backward is None:
            return
        if backward.touched or self._started:
            raise UsageError("flush() between backward() and step()")
        for spec, param in zip(self._plan.params, self._params, strict=True):
            packed = self._policy.routing.packed(spec)
            param.grad = torch.zeros_like(param, memory_format=torch.contiguous_format) if packed else None
        outputs = [param if param.grad is None else param.grad for param in self._params]
        self._exchange.flush(outputs)
        if self._momentum is None:
            self._inner.step()
        else:
            with self._momentum.taken_over():
                self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        self._flushed = True

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"ringprune"`` what this rank keeps; save it on every rank."""
        state = self._inner.state_dict()
        if self._backward is not None:
            state["ringprune"] = {
                "format": checkpoint.FORMAT,
                "rank": self._comm.rank,
                "size": self._comm.size,
                "step": self._exchange.step,
                "flushed": self._flushed,
                "parameters": checkpoint.save_tensors(self._state()),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; on every rank, each from its own unless it was saved after a flush.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
            UsageError: between backward and step.
        """
        own = {key: value for key, value in state_dict.items() if key != "ringprune"}
        backward = self._open_backward()
        if backward is not None:
            if backward.touched:
                raise UsageError("load_state_dict() between backward() and step()")
            saved = state_dict.get("ringprune")
            checkpoint.check_origin(saved, self._comm.rank, self._comm.size)
            checkpoint.load_tensors(self._state(), saved["parameters"])
            self._exchange.resumed(saved["step"])
            self._flushed = saved["flushed"]
        self._inner.load_state_dict(own)
        self._share()

    def _state(self) -> dict[str, dict[str, Tensor]]:
        state = self._exchange.state()
        if self._momentum is not None:
            for name, buffer in self._momentum.state().items():
                state.setdefault(name, {})["momentum"] = buffer
        return state

    def close(self) -> None:
        """Remove the hooks from the parameters, so that the model can be wrapped again; this wrapper is done."""
        if self._backward is not None:
            self._backward.close()
            self._backward, self._closed = None, True

    def _open_backward(self) -> Backward | None:
        """None on ranks outside the process set.

        Raises:
            UsageError: the wrapper was closed.
        """
        if getattr(self, "_closed", False):
            raise UsageError("this DistributedOptimizer was closed")
        return self._backward


def _communicator(comm: Communicator | str | None, process_set: Any) -> Communicator:
    if comm is None or isinstance(comm, str):
        options = {} if process_set is None else {"process_set": process_set}
        return connect("horovod" if process_set is not None and comm is None else comm, **options)
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f'comm={comm!r}: a communicator from ringprune.connect, its kind as a string, or None')
    if process_set is not None:
        raise ConfigurationError("process_set goes with Horovod; pass it to ringprune.connect('horovod', process_set=...)")
    return comm
