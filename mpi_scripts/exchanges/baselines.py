"""Dense exchanges as their libraries make them: Horovod's optimizer, torch's DistributedDataParallel over Gloo."""

from typing import Any

import torch
from torch import Tensor

from exchanges.choice import Choice
from exchanges.errors import CannotRun
from exchanges.exchange import Account, Exchange, allreduce_bytes
from exchanges.gradients import Gradients
from exchanges.job import Job

__all__ = ["gloo_fp16", "gloo_fp32", "horovod_fp16", "horovod_fp32"]


class _Dense:
    """Counts what an allreduce of everything sends at each step: these libraries keep no account."""

    messages = None

    def __init__(self, module: Gradients, bytes_each: int, ranks: int) -> None:
        self._module = module
        self._bytes_per_step = allreduce_bytes(module.entries, bytes_each, ranks)
        self._steps = 0

    def prepare(self) -> Tensor:
        loss: Tensor = self._module()
        return loss

    def account(self) -> Account:
        total = self._steps * self._bytes_per_step
        return Account(sent=total, values=total)

    def close(self) -> None:
        """Nothing is held."""


class _Horovod(_Dense):
    """``hvd.DistributedOptimizer``: allreduces start in hooks, its background thread fuses and sends."""

    def __init__(self, module: Gradients, job: Job, *, half: bool) -> None:
        super().__init__(module, 2 if half else 4, job.size)
        hvd = _horovod()
        hvd.init()
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
            named_parameters=module.named_parameters(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
        )

    def run(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.synchronize()
        self._steps += 1


class _DistributedDataParallel(_Dense):
    """``DistributedDataParallel`` with its own buckets; the gradients are averages when backward returns."""

    def __init__(self, module: Gradients, job: Job, *, half: bool) -> None:
        super().__init__(module, 2 if half else 4, job.size)
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        job.join_torch()
        self._wrapped = DistributedDataParallel(module)
        if half:
            self._wrapped.register_comm_hook(None, fp16_compress_hook)

    def prepare(self) -> Tensor:
        loss: Tensor = self._wrapped()
        return loss

    def run(self, loss: Tensor) -> None:
        loss.backward()
        self._steps += 1


def _horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise CannotRun(f"Horovod cannot be used here ({error})") from error
    return hvd


def horovod_fp32(job: Job, module: Gradients, choice: Choice) -> Exchange:
    """Horovod as it is."""
    return _Horovod(module, job, half=False)


def horovod_fp16(job: Job, module: Gradients, choice: Choice) -> Exchange:
    """Horovod with its fp16 compression."""
    return _Horovod(module, job, half=True)


def gloo_fp32(job: Job, module: Gradients, choice: Choice) -> Exchange:
    """DistributedDataParallel as it is."""
    return _DistributedDataParallel(module, job, half=False)


def gloo_fp16(job: Job, module: Gradients, choice: Choice) -> Exchange:
    """DistributedDataParallel with its fp16 hook."""
    return _DistributedDataParallel(module, job, half=True)
