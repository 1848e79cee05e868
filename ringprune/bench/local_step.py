"""What the wrapper costs outside of communication, for the parameters of a whole model."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import ringprune as rp
from ringprune.bench.bucket import MOMENTUM, WARMUP, Case
from ringprune.bench.stopwatch import Times, stopwatch
from ringprune.comm.communicator import CPU, Communicator, Handle, Nodes

__all__ = ["local_step"]

LEARNING_RATE = 1e-6  # the weights stay what they are


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
    threads = torch.get_num_threads()

    def rank(comm: Communicator) -> dict[str, Any]:
        torch.set_num_threads(threads)
        return _Steps(case, device, seed, _Timed(comm)).time(repetitions)

    return rp.simulate(1, rank, timeout=None)[0]


class _Steps:
    """A wrapped and a plain optimizer on the same parameters, and gradients for them."""

    def __init__(self, case: Case, device: torch.device, seed: int, comm: "_Timed") -> None:
        self._random = torch.Generator(device).manual_seed(seed)
        self._comm, self._clock = comm, stopwatch(device)
        self._params = [
            torch.nn.Parameter(torch.randn(shape, generator=self._random, device=device)) for shape in case.shapes
        ]
        self._wrapped = rp.DistributedOptimizer(
            self._sgd(), [(str(i), p) for i, p in enumerate(self._params)], policy=rp.IWP(case.density), comm=comm
        )
        self._plain = self._sgd()

    def _sgd(self) -> torch.optim.SGD:
        return torch.optim.SGD(self._params, lr=LEARNING_RATE, momentum=MOMENTUM)

    def time(self, repetitions: int) -> dict[str, Any]:
        """Both optimizers' steps, by turns, after the warm-up."""
        wrapped, plain, inside = Times(), Times(), Times()
        for repetition in range(WARMUP + repetitions):
            self._draw()
            self._comm.seconds = 0.0
            sample, _ = self._clock.time(self._step)
            other, _ = self._clock.time(self._plain.step)
            if repetition >= WARMUP:
                wrapped.samples.append(sample)
                plain.samples.append(other)
                inside.samples.append(type(sample)(self._comm.seconds, sample.waited))
        self._wrapped.close()
        return {
            "step_overhead_ms": (wrapped.seconds - plain.seconds - inside.seconds) * 1e3,
            "wrapped_step_ms": wrapped.seconds * 1e3,
            "sgd_step_ms": plain.seconds * 1e3,
            "communicator_ms": inside.seconds * 1e3,
            "steps_kept": min(wrapped.kept, plain.kept),
            "steps_of": repetitions,
        }

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
