"""Horovod: built once through a CMake tool-chain file, its wheel kept in the cache under all that it depends on.

The last release asks for C++14, too old for torch's headers, so a plain `pip install horovod` fails;
horovod_toolchain.cmake tells CMake from outside to use C++20. Horovod's CMake project, Open MPI's compiler wrappers
and spaces in a path do not go together, so the build sees .venv through a link in a temporary folder.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mpi_choice
from checkout import CACHE, HERE, VENV, Choices, environment, installed, jobs, of_horovod, pins, pip
from prerequisites import compiler
from steps import Log

__all__ = ["facts", "install"]

BUILD = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


def facts(choices: Choices) -> object:
    """The folder of the wheel, which names all it depends on, and what is installed."""
    return [_folder(choices).name, installed().get("horovod")]


def install(log: Log, choices: Choices) -> str:
    """Install Horovod's wheel; build it where the cache has none."""
    folder = _folder(choices)
    remark = "installed from the cache" if any(folder.glob("*.whl")) else "built"
    if remark == "built":
        print("building, about 3 minutes on 2 cores ... ", end="", flush=True)
        _build(log, choices, folder)
    log.call(pip("install", "--no-index", "--no-deps", "--force-reinstall", next(folder.glob("*.whl"))))
    return remark


def _build(log: Log, choices: Choices, folder: Path) -> None:
    """Build the wheel and put it into ``folder``, whole or not at all."""
    with tempfile.TemporaryDirectory(prefix="ringprune-", dir=_folder_without_space()) as name:
        place = Path(name)
        place.joinpath("venv").symlink_to(VENV)
        place.joinpath("cmake").symlink_to(HERE)
        arguments: list[str | Path] = [
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--wheel-dir",
            place / "wheels",
        ]
        python, *words = pip("wheel", "--verbose", *arguments, *pins()["horovod"])
        log.call([place / "venv" / "bin" / Path(python).name, *words], _variables(choices, place))
        folder.mkdir(parents=True, exist_ok=True)
        wheel = next(place.joinpath("wheels").glob("*.whl"))
        shutil.copy(wheel, folder / "incomplete")
        os.replace(folder / "incomplete", folder / wheel.name)


def _wrappers(choices: Choices, place: Path) -> dict[str, str]:
    """Where Open MPI's compiler wrappers are, for the CMake file.

    Those of the wheel set their own prefix, which may have a space; the program behind them heeds ours.
    """
    if choices["MPI"] == "system":
        return {"MPI_WRAPPERS": str(mpi_choice.site("mpicxx").parent), "MPI_FOLDERS": mpi_choice.site_libraries()}
    place.joinpath("wrappers").mkdir()
    for name in ("mpicc", "mpicxx"):
        place.joinpath("wrappers", name).symlink_to(place / "venv" / "bin" / "opal_wrapper")
    return {"MPI_WRAPPERS": str(place / "wrappers"), "OPAL_PREFIX": str(place / "venv")}


def _variables(choices: Choices, place: Path) -> dict[str, str]:
    """The environment of the build."""
    own = {
        "CMAKE_TOOLCHAIN_FILE": str(place / "cmake" / "horovod_toolchain.cmake"),
        "MAKEFLAGS": f"-j{jobs()}",
        "PATH": os.pathsep.join([str(place / "venv" / "bin"), environment()["PATH"]]),
        "TMPDIR": str(place),
        "VIRTUAL_ENV": str(place / "venv"),
    }
    return {**BUILD, **of_horovod(choices), **own, **_wrappers(choices, place)}


def _folder(choices: Choices) -> Path:
    """Where the wheel belongs: versions for people to read, and a digest of everything it depends on."""
    python = next(VENV.glob("lib/python*/site-packages"), Path("python/none")).parent.name
    mpi = mpi_choice.describe(choices)
    names = [pins()["horovod"][0], "torch " + installed().get("torch", "none"), python, mpi]
    depends = [*names, _compiler(), platform.machine(), BUILD, of_horovod(choices)]
    files = [HERE / "horovod_toolchain.cmake", HERE / "horovod_project.cmake"]
    text = json.dumps(depends) + "".join(file.read_text() for file in files)
    readable = re.sub(r"[^A-Za-z0-9.+]+", "-", "_".join(names[:3]))
    return CACHE / "wheels" / f"{readable}-{choices['MPI']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _compiler() -> str:
    """The first line the C++ compiler says about its version."""
    done = subprocess.run([*compiler().split(), "--version"], capture_output=True, text=True)
    return (done.stdout.splitlines() or ["unknown"])[0]


def _folder_without_space() -> str:
    temporary = tempfile.gettempdir()
    return temporary if " " not in temporary else "/tmp"
