"""What the wrapper costs outside of communication, for the parameters of a whole model."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import ringprune as rp
from ringprune.bench.bucket import MOMENTUM, WARMUP, Case
from ringprune.bench.stopwatch import Sample, Times, stopwatch
from ringprune.comm.communicator import CPU, Communicator, Handle, Nodes
from ringprune.policies import Policy
from ringprune.simulation import spec

__all__ = ["OPTIMIZERS", "RECOMMENDED", "local_step", "policy_of", "step_costs"]

LEARNING_RATE = 1e-6  # the weights stay what they are
OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
}
"""Optimizers to wrap, by name."""
RECOMMENDED = "recommended"
"""What the wrapper's ``policy="iwp"`` stands for."""


def policy_of(method: str) -> Callable[[torch.optim.Optimizer], Policy]:
    """What makes the policy for an optimizer.

    Raises:
        ConfigurationError: there is none of that name, or it has no such argument.
    """
    if method == RECOMMENDED:
        return rp.recommended
    if method.startswith(f"{RECOMMENDED}:"):
        raise rp.ConfigurationError(f"policy {method!r}: {RECOMMENDED} takes no arguments; iwp:density=... does")
    policy = spec.policy_of(method)
    return lambda inner: policy


def local_step(case: Case, device: torch.device, repetitions: int, seed: int) -> dict[str, Any]:
    """Time a step of ``rp.DistributedOptimizer`` with IWP on one simulated rank, from gradients that are there.

    A step is what autograd's hooks do in backward, then ``optimizer.step()``. Taken off are a step of plain
    ``torch.optim.SGD`` with momentum on the same parameters, and the time inside the communicator's calls and waits.
    The wrapper's own settings are the defaults: buckets, the second copy of the state, checks for NaN, verdict, and
    tensors of one dimension travel dense.

    Args:
        case: shapes and density.
        device: where.
        repetitions: steps that are timed.
        seed: of weights and gradients.

    Returns:
        ``step_overhead_ms`` and what it is made of.
    """
    sgd = OPTIMIZERS["sgd"]
    return step_costs(case.shapes, device, repetitions, seed, lambda inner: rp.IWP(case.density), sgd, steps=1)


def step_costs(
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    repetitions: int,
    seed: int,
    policy: Callable[[torch.optim.Optimizer], Policy],
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    steps: int,
) -> dict[str, Any]:
    """The same for any policy and optimizer.

    Args:
        shapes: of the parameters.
        device: where.
        repetitions: how many times ``steps`` steps are timed.
        seed: of weights and gradients.
        policy: makes it for the wrapped optimizer.
        optimizer: makes one of parameters.
        steps: of which one exchanges: a time is a ``steps``-th of all of them.

    Returns:
        ``step_overhead_ms`` and what it is made of.
    """
    threads = torch.get_num_threads()

    def rank(comm: Communicator) -> dict[str, Any]:
        torch.set_num_threads(threads)
        return _Steps(shapes, device, seed, _Timed(comm), policy, optimizer).time(repetitions, steps)

    return rp.simulate(1, rank, timeout=None)[0]


class _Steps:
    """A wrapped and a plain optimizer, and gradients for both.

    Each has parameters of its own: where another changes them, local steps begin by looking for what has changed.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        seed: int,
        comm: "_Timed",
        policy: Callable[[torch.optim.Optimizer], Policy],
        optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self._random = torch.Generator(device).manual_seed(seed)
        self._comm, self._clock = comm, stopwatch(device)
        self._params = [
            torch.nn.Parameter(torch.randn(shape, generator=self._random, device=device)) for shape in shapes
        ]
        self._twins = [torch.nn.Parameter(param.detach().clone()) for param in self._params]
        self._plain, inner = optimizer(self._twins), optimizer(self._params)
        self._wrapped = rp.DistributedOptimizer(
            inner, [(str(i), p) for i, p in enumerate(self._params)], policy=policy(inner), comm=comm
        )

    def time(self, repetitions: int, steps: int) -> dict[str, Any]:
        """Both optimizers' steps, by turns, after the warm-up."""
        for _ in range(-(-WARMUP // steps) * steps):
            self._draw()
            self._step()
            self._alone()
        wrapped, plain, inside = Times(), Times(), Times()
        for _ in range(repetitions):
            samples = [self._both() for _ in range(steps)]
            ours, alone, seconds = zip(*samples, strict=True)
            wrapped.samples.append(_mean(ours))
            plain.samples.append(_mean(alone))
            inside.samples.append(Sample(sum(seconds) / steps, wrapped.samples[-1].waited))
        self._wrapped.close()
        return {
            "step_overhead_ms": (wrapped.seconds - plain.seconds - inside.seconds) * 1e3,
            "wrapped_step_ms": wrapped.seconds * 1e3,
            "sgd_step_ms": plain.seconds * 1e3,
            "communicator_ms": inside.seconds * 1e3,
            "steps_kept": min(wrapped.kept, plain.kept),
            "steps_of": repetitions,
        }

    def _both(self) -> tuple[Sample, Sample, float]:
        """A step of each, and the seconds of the first inside the communicator."""
        self._draw()
        self._comm.seconds = 0.0
        wrapped, _ = self._clock.time(self._step)
        return wrapped, self._alone(), self._comm.seconds

    def _alone(self) -> Sample:
        """A step of the plain optimizer on the same gradients, which are the wrapped one's alone again afterwards."""
        for twin, param in zip(self._twins, self._params, strict=True):
            twin.grad = param.grad
        sample, _ = self._clock.time(self._plain.step)
        for twin in self._twins:
            twin.grad = None
        return sample

    def _draw(self) -> None:
        for param in self._params:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.normal_(generator=self._random)

    def _step(self) -> None:
        """As backward would, call the hooks in reverse order; then step."""
        for param in reversed(self._params):
            for hook in _hooks(param):
                hook(param)
        self._wrapped.step()


def _mean(samples: Sequence[Sample]) -> Sample:
    seconds = sum(sample.seconds for sample in samples)
    waited = sum(sample.waited * sample.seconds for sample in samples)
    return Sample(seconds / len(samples), waited / seconds if seconds else 0.0)


def _hooks(param: Any) -> Sequence[Any]:
    """The hooks that autograd calls when a parameter's gradient is there."""
    return list(param._post_accumulate_grad_hooks.values())


class _Timed:
    """A communicator that counts the seconds spent in its calls and waits.

    Attributes:
        seconds: spent so far; set it to zero to start anew.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.kind, self.rank, self.size, self.threads = comm.kind, comm.rank, comm.size, comm.threads
        self.abilities, self.traffic = comm.abilities, comm.traffic
        self.seconds = 0.0

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Handle:
        start = perf_counter()
        try:
            return _TimedHandle(self, call(*args, **kwargs))
        finally:
            self.seconds += perf_counter() - start

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Handle:
        return self._call(self._comm.broadcast, tensor, root, name=name)

    def allreduce(self, tensor: Tensor, *, name: str) -> Handle:
        return self._call(self._comm.allreduce, tensor, name=name)

    def allreduce_group(self, tensors: Sequence[Tensor], *, factor: float = 1.0, name: str) -> Handle:
        return self._call(self._comm.allreduce_group, tensors, factor=factor, name=name)

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int] | None = None, name: str) -> Handle:
        return self._call(self._comm.allgather, tensor, sizes=sizes, name=name)

    def alltoall(self, tensor: Tensor, *, name: str, **kwargs: Any) -> Handle:
        return self._call(self._comm.alltoall, tensor, name=name, **kwargs)

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> Handle:
        return self._call(self._comm.shift, tensor, into, name=name)

    def progress(self) -> None:
        self._comm.progress()

    def barrier(self, *, name: str) -> None:
        self._comm.barrier(name=name)

    def divide(self, device: torch.device = CPU) -> Nodes:
        return self._comm.divide(device)

    def duplicate(self) -> Communicator:
        return self._comm.duplicate()

    def close(self) -> None:
        self._comm.close()


class _TimedHandle:
    def __init__(self, timed: _Timed, handle: Handle) -> None:
        self._timed, self._handle = timed, handle

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> Tensor:
        start = perf_counter()
        try:
            return self._handle.wait()
        finally:
            self._timed.seconds += perf_counter() - start
