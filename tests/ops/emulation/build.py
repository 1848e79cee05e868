"""Build csrc/cuda for the CPU into a library that torch can load: ``python tests/ops/emulation/build.py OUT [FLAGS]``.

Flags go to the compiler, for example ``-fsanitize=address,undefined``. Sources that have not changed since are not
compiled again.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
FLAGS = ["-O1", "-g1", "-std=c++20", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-attributes"]
DEFINES = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
LIBRARIES = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
LIBRARY = "emulated.so"


def compiler() -> str | None:
    """The C++ compiler, or None where there is none."""
    return shutil.which("g++")


def build(out: Path, extra: list[str]) -> Path:
    """Compile what has changed, link all of it, and return the library."""
    out.mkdir(parents=True, exist_ok=True)
    kernels = [*CSRC.glob("cuda/*.cu"), *HERE.glob("*.cu")]
    sources = [*sorted(kernels), *sorted(CSRC.glob("cuda/host/*.cpp")), HERE / "cuda_on_cpu.cpp"]
    library = out / LIBRARY
    _compile(HERE / "prelude.h", out, extra)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(source, out, extra), sources))
    if not library.exists() or any(o.stat().st_mtime > library.stat().st_mtime for o in objects):
        _run("g++", "-shared", *extra, *map(str, objects), *LIBRARIES, "-o", str(library))
    return library


def _compile(source: Path, out: Path, extra: list[str]) -> Path:
    header = source.suffix == ".h"  # "#pragma once" in a file of its own is warned of, and nothing turns that off
    warnings = ["-w"] if header else WARNINGS
    target = out / f"{source.name}.{'gch' if header else 'o'}"
    if target.exists() and target.stat().st_mtime > _newest(source):
        return target
    folders = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    include = [f"-I{HERE}", *folders]
    if source.suffix == ".cpp":
        include += ["-include", str(out / "prelude.h")]  # the compiler takes prelude.h.gch beside it
    language = "c++-header" if header else "c++"
    _run("g++", "-c", *FLAGS, *warnings, *DEFINES, *extra, *include, "-x", language, str(source), "-o", str(target))
    return target


def _newest(source: Path) -> float:
    """When the source or any header last changed."""
    headers = [path for folder in (CSRC, HERE) for path in folder.rglob("*.*h")]
    return max(path.stat().st_mtime for path in [source, *headers])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sys.argv[2:]))
