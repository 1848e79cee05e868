"""Watches a training script from outside: hooks of torch that see modules, gradients and steps, and change nothing."""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from ringprune.clock import Clock, CpuClock, clock_for
from ringprune.errors import ConfigurationError
from ringprune.profiles.timeline import Kind, Mark

__all__ = ["Enough", "Iteration", "Recorder"]


class Enough(BaseException):
    """All iterations are measured: ends the script, past every ``except Exception`` of its own."""


class Iteration(NamedTuple):
    """What was seen from one step of the optimizer to the next.

    Attributes:
        marks: in their order, in milliseconds since the first.
        passes: backward passes.
    """

    marks: list[Mark]
    passes: int


class Recorder:
    """Records iterations while it is entered.

    An iteration ends with a step, after a backward pass, of the optimizer that stepped first: a wrapper and what it
    wraps, or two optimizers that follow one backward pass, make one iteration. Modules are seen if they have
    parameters, where gradients are recorded, and in the thread that entered.

    Args:
        warmup: iterations before the first that is measured, at least 1: it shows which parameters are trained.
        iterations: how many are measured.
        stop: raise :class:`Enough` after them; else the script goes on unwatched.

    Attributes:
        steps: iterations seen.
        iterations: those that were measured.
        trained: the parameters that are optimized, in the optimizers' order.
        roots: models: modules with parameters that were called by no other.
        batch: shape and dtype of the model's first input.
        problem: why this script cannot be recorded; it was stopped then.
    """

    def __init__(self, warmup: int, iterations: int, *, stop: bool) -> None:
        self._warmup, self._wanted, self._stop = warmup, iterations, stop
        self.steps = 0
        self.iterations: list[Iteration] = []
        self.trained: dict[Tensor, None] = {}
        self.roots: dict[nn.Module, None] = {}
        self.batch: str | None = None
        self.problem: ConfigurationError | None = None
        self._clock: Clock = CpuClock()
        self._marks: list[Mark] = []
        self._measuring = self._closed = False
        self._depth = self._inside_backward = self._passes = 0
        self._leader: set[Tensor] = set()
        self._with_parameters: dict[nn.Module, bool] = {}
        self._thread = threading.get_ident()
        self._backward: Callable[..., None] = torch.autograd.backward
        self._handles: list[Any] = []

    def __enter__(self) -> "Recorder":
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        self._stepping = register_optimizer_step_post_hook(self._step)
        # What every way into a backward pass goes through; torch has no hook there.
        self._backward = torch.autograd.backward
        setattr(torch.autograd, "backward", self._run_backward)  # noqa: B010 - mypy lets nobody assign it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        self._stepping.remove()

    def _close(self) -> None:
        """Stop watching; but torch walks along the hooks of a step when that hook says so, and it stays among them."""
        self._closed, self._measuring = True, False
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # where torch leaves it, and ever after sees a hook
        self._handles.clear()
        if torch.autograd.backward == self._run_backward:
            setattr(torch.autograd, "backward", self._backward)  # noqa: B010 - mypy lets nobody assign it

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _mark(self, kind: Kind, what: Any = None) -> None:
        self._marks.append(Mark(kind, what, self._clock.now()))

    def _watched(self, module: nn.Module) -> bool:
        """Whether it is part of a model and runs forward, to be trained; what runs inside backward is backward's."""
        if not torch.is_grad_enabled() or self._inside_backward or threading.get_ident() != self._thread:
            return False
        known = self._with_parameters.get(module)
        if known is None:
            known = self._with_parameters[module] = any(True for _ in module.parameters())
        return known

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._watched(module):
            self._depth += 1
            if self._measuring:
                self._mark(Kind.ENTER, module)
            if self._depth == 1:
                self.roots[module] = None

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if self._watched(module) and self._depth:
            if self._measuring:
                self._mark(Kind.LEAVE, module)
            self._depth -= 1
            if not self._depth and self.batch is None:
                keywords = rest[0] if isinstance(rest[0], dict) else {}
                self.batch = _described([*args, *keywords.values()])

    def _run_backward(self, *args: Any, **kwargs: Any) -> None:
        """``torch.autograd.backward``, between two marks."""
        outermost = not self._inside_backward
        if outermost and self._measuring:
            self._mark(Kind.BACKWARD)
        self._inside_backward += 1
        try:
            self._backward(*args, **kwargs)
        finally:
            self._inside_backward -= 1
        if outermost:
            self._passes += 1
            if self._measuring:
                self._mark(Kind.DONE)

    def _ready(self, param: Tensor) -> None:
        if self._measuring:
            self._mark(Kind.READY, param)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._closed:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._meet(params)
        if not self._passes or not (self._leader or params):
            return
        self._leader = self._leader or set(params)
        if self._leader.isdisjoint(params):
            return
        self.steps += 1
        if self._measuring:
            self.iterations.append(self._iteration())
        self._passes, self._marks = 0, []
        if self.steps == self._warmup:
            self._begin()
        if self.problem is not None or len(self.iterations) == self._wanted:
            self._close()
            if self._stop or self.problem is not None:
                raise Enough

    # -- between iterations -------------------------------------------------------------------------------------------

    def _meet(self, params: Iterable[Tensor]) -> None:
        """Hooks for parameters not seen before."""
        for param in params:
            if param not in self.trained and param.requires_grad and param.numel():
                self.trained[param] = None
                register: Any = param.register_post_accumulate_grad_hook
                self._handles.append(register(self._ready))

    def _begin(self) -> None:
        try:
            self._clock = clock_for({param.device for param in self.trained})
        except ConfigurationError as error:
            self.problem = error
        self._measuring = True

    def _iteration(self) -> Iteration:
        times = self._clock.since(self._marks[0].when, [mark.when for mark in self._marks]) if self._marks else []
        marks = [mark._replace(when=time) for mark, time in zip(self._marks, times, strict=True)]
        return Iteration(marks, self._passes)

    @property
    def called(self) -> list[nn.Module]:
        """The modules that were called in the iterations measured, in the order of their first call."""
        entered = (mark.what for one in self.iterations for mark in one.marks if mark.kind is Kind.ENTER)
        return list(dict.fromkeys(entered))


def _described(values: Iterable[Any]) -> str | None:
    """The first tensor among them: its shape and dtype."""
    for value in values:
        if isinstance(value, Tensor):
            shape = " x ".join(map(str, value.shape)) or "a number"
            return f"{shape} of {str(value.dtype).removeprefix('torch.')}"
    return None
