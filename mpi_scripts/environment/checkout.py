"""Where things lie in this checkout, which versions are pinned and installed, and what the user chose."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cuda_toolkit import find_toolkit

__all__ = [
    "CACHE",
    "HERE",
    "LOGS",
    "PYTHON",
    "ROOT",
    "VENV",
    "Choices",
    "environment",
    "installed",
    "jobs",
    "of_horovod",
    "pins",
    "pip",
    "read_choices",
    "remember",
]

Choices = Mapping[str, str]  # by the names of the variables in set_up.py

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
LOGS = ROOT / "build" / "logs"
CONSTRAINTS = HERE / "constraints.txt"
CHOSEN = VENV / "choices.json"
NOT_PASSED_ON = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")
HOROVOD_BUILD = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU", "HOROVOD_NCCL", "HOROVOD_CUDA", "HOROVOD_BUILD")
# The first value is the default; empty means that nothing was said.
ALLOWED = {"MPI": ("wheel", "system"), "TORCH": ("", "any", "cpu"), "RINGPRUNE_BUILD": ("auto", "cpu", "cuda", "none")}


def _normal(name: str) -> str:
    """A package's name as package indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, list[str]]:
    """The lines of constraints.txt by package; several where Python versions need different ones."""
    found: dict[str, list[str]] = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            found.setdefault(_normal(line.split("==")[0]), []).append(line)
    return found


def installed() -> dict[str, str]:
    """Packages in .venv and their versions."""
    folders = VENV.glob("lib/python*/site-packages/*.dist-info")
    pairs = (folder.name.removesuffix(".dist-info").split("-", 1) for folder in folders)
    return {_normal(name): version for name, version in pairs}


def pip(command: str, *arguments: str | Path) -> list[str | Path]:
    """A call of pip in .venv, held to the pinned versions."""
    held: list[str | Path] = ["--constraint", CONSTRAINTS] if command == "install" else []
    return [PYTHON, "-m", "pip", command, *held, *arguments]


def environment() -> dict[str, str]:
    """What the steps run under: .venv first on PATH, then the CUDA toolkit; nothing of make's or of other Pythons."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    toolkit = find_toolkit()
    if toolkit is not None:
        kept["CUDA_HOME"] = str(toolkit)
    folders = [VENV / "bin", *([] if toolkit is None else [toolkit / "bin"]), os.environ.get("PATH", os.defpath)]
    path = os.pathsep.join(map(str, folders))
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_USER": "0"}
    return {**kept, **quiet, "PATH": path, "VIRTUAL_ENV": str(VENV), "MAX_JOBS": str(jobs())}


def jobs() -> int:
    """How many compilers may run at once: ``JOBS``, or the cores this process may use."""
    return int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))


def read_choices(variables: Mapping[str, str]) -> Choices:
    """What was chosen at earlier runs, changed by what ``variables`` say now.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    given = {name: variables[name] for name in variables if name in ALLOWED or name.startswith(HOROVOD_BUILD)}
    chosen = {**_remembered(), **{name: value for name, value in given.items() if value}}
    for name, allowed in ALLOWED.items():
        if chosen.setdefault(name, allowed[0]) not in allowed:
            raise ValueError(f"{name}={chosen[name]} is not one of {', '.join(filter(None, allowed))}")
    return chosen


def remember(choices: Choices) -> None:
    """Write the choices down in .venv."""
    CHOSEN.write_text(json.dumps(dict(choices), indent=1))


def of_horovod(choices: Choices) -> dict[str, str]:
    """Horovod's own build variables among the choices."""
    return {name: value for name, value in choices.items() if name.startswith(HOROVOD_BUILD)}


def _remembered() -> dict[str, str]:
    try:
        return dict(json.loads(CHOSEN.read_text()))
    except (OSError, ValueError):
        return {}
