"""Where a rank runs: the MPI it finds without a launcher, and its device."""

import os
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

__all__ = ["device_of_this_rank", "find_mpi"]


def find_mpi() -> None:
    """Let ``python train_digits.py`` run as one rank where Open MPI came as a wheel.

    ``mpirun`` and ``horovodrun`` tell Open MPI where it is installed; without them it looks where it was built.
    """
    if (Path(sys.prefix) / "bin" / "orted").exists():
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)


def device_of_this_rank() -> torch.device:
    """The GPU with the number this rank has on its machine, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())
