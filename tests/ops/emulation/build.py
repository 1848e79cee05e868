"""Build csrc/cuda for the CPU into a library that torch can load: ``python tests/ops/emulation/build.py OUT [FLAGS]``.

Flags go to the compiler, for example ``-fsanitize=address,undefined``. Sources that have not changed since are not
compiled again.
"""

import contextlib
import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def build(out: Path, extra: list[str], like: Path | None = None) -> Path:
    """Compile what has changed, link all of it, and return the library.

    Args:
        out: the folder for it.
        extra: flags of the compiler.
        like: the folder of a build without ``extra``, which are definitions; objects to which they make no difference
            are taken from there.
    """
    out.mkdir(parents=True, exist_ok=True)
    library = out / LIBRARY
    with _one_at_a_time(out):
        objects = _compile_all(out, extra, like)
        if not library.exists() or any(o.stat().st_mtime > library.stat().st_mtime for o in objects):
            _run("g++", "-shared", *extra, *map(str, objects), *LIBRARIES, "-o", str(library))
    return library


@contextlib.contextmanager
def _one_at_a_time(out: Path) -> Iterator[None]:
    """Others that build into ``out``, as tests side by side, wait meanwhile."""
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile_all(out: Path, extra: list[str], like: Path | None) -> list[Path]:
    kernels = [*CSRC.glob("cuda/*.cu"), *HERE.glob("*.cu")]
    sources = [*sorted(kernels), CSRC / "cuda/host.cpp", HERE / "cuda_on_cpu.cpp"]

    def compiled(source: Path) -> Path:
        return _same(source, like, extra) or _compile(source, out, extra)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, sources))


def _same(source: Path, like: Path | None, definitions: list[str]) -> Path | None:
    """The object of ``source`` in ``like``, if no file of ours that it was made of has a word of the definitions."""
    if like is None:
        return None
    assert all(re.fullmatch(r"-D\w+", flag) for flag in definitions), "they are looked for in the sources"
    target = like / f"{source.name}.o"
    made_of = {Path(name) for name in target.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]}
    text = "".join(path.read_text() for path in made_of if path.is_relative_to(CSRC.parent))
    return None if any(flag.removeprefix("-D") in text for flag in definitions) else target


def _compile(source: Path, out: Path, extra: list[str]) -> Path:
    target = out / f"{source.name}.o"
    if target.exists() and target.stat().st_mtime > _newest(source):
        return target
    folders = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    flags = [*FLAGS, *WARNINGS, *DEFINES, *extra, f"-I{HERE}", *folders]
    _run("g++", "-c", "-MMD", *flags, "-x", "c++", str(source), "-o", str(target))
    return target


def _newest(source: Path) -> float:
    """When the source or anything it may include last changed."""
    included = [*CSRC.glob("cuda/host/*.cpp"), *(path for folder in (CSRC, HERE) for path in folder.rglob("*.*h"))]
    return max(path.stat().st_mtime for path in [source, *included])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sys.argv[2:]))
