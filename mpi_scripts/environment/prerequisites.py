"""Checks what the set-up needs from the machine, before anything is downloaded."""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["compiler", "missing"]

NEEDED_GB = 4
PROGRAM = "#include <span>\n#include <concepts>\nint main() { return 0; }\n"


def compiler() -> str:
    """The C++ compiler: ``CXX``, or the first of c++, g++, clang++ on PATH; empty where there is none."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((name for name in names if name and shutil.which(name.split()[0])), "")


def missing(root: Path) -> list[str]:
    """What is missing on this machine, each with how to get it; empty where all is there."""
    checks: list[Callable[[], str]] = [_venv, _headers, _compiler, _make, lambda: _disk(root)]
    return [message for message in (check() for check in checks) if message]


def _venv() -> str:
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return ""
    return "Python's venv module. Debian, Ubuntu: apt install python3-venv. Others: a full Python >= 3.10, PYTHON=..."


def _headers() -> str:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return ""
    return f"Python's headers ({header}). Debian, Ubuntu: apt install python3-dev. Fedora: dnf install python3-devel."


def _compiler() -> str:
    name = compiler()
    if not name:
        return "A C++ compiler. Debian, Ubuntu: apt install g++. Fedora: dnf install gcc-c++. Cluster: module load gcc."
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(PROGRAM)
        command = [*name.split(), "-std=c++20", str(source), "-o", str(Path(folder, "probe"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or ["no message"])[0]
    return f"A C++ compiler for C++20, g++ >= 10 or clang >= 12; {name} says: {reason}. Name another one with CXX=..."


def _make() -> str:
    return "" if shutil.which("make") else "make. Debian, Ubuntu: apt install make. Fedora: dnf install make."


def _disk(root: Path) -> str:
    free = shutil.disk_usage(root).free / 1e9
    return "" if free > NEEDED_GB else f"Disk space: {free:.1f} GB free in {root}, about {NEEDED_GB} GB needed."
