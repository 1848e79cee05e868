"""The ranks of a job, whoever started them: Horovod's, or torch.distributed's where torchrun did."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["barrier", "broadcast_parameters", "gather", "mean", "rank", "size", "start", "started_by_torchrun", "total"]


def start() -> torch.device:
    """Start Horovod, or torch.distributed under torchrun; returns this rank's GPU, or the CPU where there is none."""
    if started_by_torchrun():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return _device(int(os.environ["LOCAL_RANK"]))
    _find_mpi()
    _horovod().init()
    return _device(_horovod().local_rank())


def started_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return dist.is_torchelastic_launched()


def rank() -> int:
    """Number of this rank."""
    return dist.get_rank() if dist.is_initialized() else int(_horovod().rank())


def size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(_horovod().size())


def barrier() -> None:
    """Wait until every rank has come here."""
    if dist.is_initialized():
        gather(None)  # travels over the CPU, whatever the model's device
    else:
        _horovod().barrier()


def broadcast_parameters(state: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors of ``state`` with those of rank 0."""
    if dist.is_initialized():
        for tensor in state.values():
            dist.broadcast(tensor, src=0)
    else:
        _horovod().broadcast_parameters(state, root_rank=0)


def gather(thing: Any) -> list[Any]:
    """What every rank has given, in rank order."""
    if not dist.is_initialized():
        # By itself Horovod names it after the type, and ranks that give other types wait for each other for ever.
        return list(_horovod().allgather_object(thing, name="gather"))
    things = [None] * size()
    dist.all_gather_object(things, thing)
    return things


def total(tensor: Tensor) -> Tensor:
    """The sum over the ranks."""
    if not dist.is_initialized():
        return _horovod().allreduce(tensor, op=_horovod().Sum)
    summed = tensor.clone()
    dist.all_reduce(summed)
    return summed


def mean(tensor: Tensor) -> Tensor:
    """The average over the ranks."""
    return total(tensor) / size()


def _horovod() -> Any:
    # Imported when it is asked for: under torchrun it need not be installed.
    import horovod.torch

    return horovod.torch


def _device(local_rank: int) -> torch.device:
    """The GPU with the number this rank has on its machine."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _find_mpi() -> None:
    """Let ``python train_digits.py`` run as one rank where Open MPI came as a wheel.

    ``mpirun`` and ``horovodrun`` tell Open MPI where it is installed; without them it looks where it was built.
    """
    if (Path(sys.prefix) / "bin" / "orted").exists():
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
