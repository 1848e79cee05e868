"""Gradient mode across the barrier between two steps (P3): each layer's forward pass waits for that layer alone.

::

    backward          gradients are cut into slices, which go out by priority while the rest is computed
    step()            notes the settings, and returns
    forward           before a layer runs, its averages are waited for and the wrapped optimizer steps on them
    synchronize()     makes what is left of the step: before parameters are read outside the forward pass

What one rank finds out about a step (a gradient that is not finite, calls in the wrong order) all ranks learn at the
end of its exchange, and so raise at the beginning of the next one.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune.driver import Driver
from ringprune.exchange.dispatch import Dispatch
from ringprune.gates import Gates
from ringprune.gradient_mode import GradientMode
from ringprune.layer_steps import LayerSteps
from ringprune.mode import Parts
from ringprune.schedule import LayerPriority
from ringprune.slicing import Piece

__all__ = ["PriorityMode"]


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
        device = self.params[0].device if self.params else torch.device("cpu")
        nbytes = [bucket.numel * bucket.dtype.itemsize for bucket in buckets]
        dispatch = Dispatch(parts.comm, self.exchange, self.metrics, schedule, nbytes, device)
        # Simulated ranks are threads already, and nothing travels there.
        self._driver = Driver(dispatch, device, threaded=parts.comm.kind != "simulated")
        self._steps = LayerSteps(parts.inner)
        this = weakref.ref(self)
        self._gates = Gates(parts.model, self.params, lambda needed: _arrive(this, needed))
        self._outputs: list[Tensor] = []
        self._left: Counter[int] = Counter()  # buckets that each parameter of the step under way still misses
        self._unfinished: set[int] = set()  # buckets of it
        self._judged = True
        weakref.finalize(self, self._driver.close)

    def _exchanged(self) -> Sequence[Tensor]:
        return [self._part(self._parameters[piece.param], piece) for piece in self._pieces]

    def _part(self, tensor: Tensor, piece: Piece) -> Tensor:
        """A piece's part of its parameter's tensor; the tensor itself where it is all of it."""
        if piece.end - piece.start == tensor.numel():
            return tensor
        return tensor.detach().view(-1)[piece.start : piece.end]

    # -- during backward ----------------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        if self._open:
            return
        self.settle()
        # Sent when the last bucket is, which may be before step() is called.
        self._verdict.saw_gradient = self.backward.touched
        self._note_strangers()
        with self._driver as dispatch:
            super()._open_step()
            rank_of = {param: place for place, param in enumerate(self._gates.order)}
            priorities = [min((rank_of[i] for i in members), default=0) for members in self._params_of]
            dispatch.begin(priorities, self._judge)
        self._judged = False
        self._unfinished = set(range(len(self.plan.buckets)))
        self._left = Counter({i: len(buckets) for i, buckets in enumerate(self._buckets_of)})

    def _start(self, index: int, factors: Sequence[float] | None) -> None:
        """This rank's own part of a bucket; the driver takes it further."""
        self._open_step()
        bucket = self.plan.buckets[index]
        owners = self._params_of[index]
        whole = dict(zip(owners, self._gradients(owners), strict=True))
        pieces = [self._pieces[i] for i in bucket.members]
        grads = [self._part(whole[piece.param], piece) for piece in pieces]
        with self._driver as dispatch:
            found = self.exchange.start_alone(index, grads, self._correction(bucket, self._factors(grads)))
            if found is None:
                self._count_nonfinite(bucket.members, grads)
            else:
                self._found.append((bucket.members, found))
            dispatch.ready(index)
        self._driver.go()

    def _judge(self) -> None:
        """All messages of the step have been started: send what this rank has found."""
        self._note_nonfinite()
        self._verdict.start()

    # -- the step -----------------------------------------------------------------------------------------------------

    def finish(self, *, stepping: bool) -> bool:
        """Start what is left; where nobody steps at once, wait for all of it, with the averages in ``param.grad``.

        Returns:
            True: what is found about a step comes to light after it.

        Raises:
            NonFiniteGradientError, UsageError: of the step before, on all ranks together.
        """
        self._open_step()
        for index in self.backward.remaining():
            self._start(index, None)
        self.backward.reset()
        self._open = False
        self._outputs = [self._output(param) for param in self.params]
        if not stepping:
            self._finish(range(len(self.plan.buckets)))
            self._write_averages()
            self._conclude()
        return True

    def _output(self, param: Tensor) -> Tensor:
        """Where the average of ``param`` is written: what was its gradient, which from now on is not."""
        grad, param.grad = param.grad, None
        if grad is None or not grad.is_contiguous() or grad.dtype != param.dtype or grad.requires_grad:
            return torch.empty(param.shape, dtype=param.dtype, device=param.device)
        return grad

    def _write_averages(self) -> None:
        for param, output in zip(self.params, self._outputs, strict=True):
            param.grad = output

    def step(self) -> None:
        """Note what the step is to be made with; layers make it when they are needed."""
        if self._unfinished:
            self.metrics.steps += 1
            self._steps.remember()
        else:  # after synchronize(): the averages are in place
            super().step()

    def settle(self) -> bool:
        """Make what is left of a step, and tell what the ranks have found about it; whether there was one.

        Raises:
            NonFiniteGradientError, UsageError: on all ranks together; the step was made.
        """
        if self._open or self._judged:
            return False
        self.arrive(range(len(self.params)))
        self._conclude()
        return True

    def arrive(self, needed: Iterable[int]) -> None:
        """Return when these parameters are up to date: all of their part of the step has been made."""
        if self._open or not self._unfinished:
            return
        made = self._finish(sorted({index for i in needed for index in self._buckets_of[i]} & self._unfinished))
        if made:
            with torch.no_grad():
                self._step_on(made)

    def _finish(self, buckets: Iterable[int]) -> list[int]:
        """Wait for buckets and write their averages; the parameters that are complete with them."""
        buckets, complete = list(buckets), []
        self._driver.wait_for(buckets)
        for index in buckets:
            with self._driver:
                bucket = self.plan.buckets[index]
                pieces = [self._pieces[i] for i in bucket.members]
                self.exchange.finish_one(index, [self._part(self._outputs[p.param], p) for p in pieces])
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
            param.grad = self._outputs[i]
        with self._steps.only(params):
            if self._momentum is not None:
                self._momentum.apply(chosen)
            self._inner_step()
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad

    def _conclude(self) -> None:
        """The step has been made: settle it with the other ranks."""
        self._driver.run_out()
        self.exchange.conclude()
        self._judged = True
        made = self._verdict.wait()
        try:
            if not made:
                self._verdict.raise_or_skip(made=True)
            self._compare("parameter", self._exchanged())
        finally:
            self._verdict.clear(
                self._verdict.fault if made else None
            )  # one that was found after the others had gone out

    # -- between steps ------------------------------------------------------------------------------------------------

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """The parameters, once what is left of a step has been made."""
        self.settle()
        yield

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

    def close(self) -> None:
        """Make what is left of a step, and let go of the model."""
        self.settle()
        self._driver.close()
        self._gates.close()
        super().close()


def _arrive(mode: "weakref.ref[PriorityMode]", needed: Sequence[int]) -> None:
    """A hook's call, which does not keep the wrapper alive."""
    alive = mode()
    if alive is not None:
        alive.arrive(needed)
