"""Builds the CPU kernels with a sanitizer into ``build/sanitizers/``, apart from the library that people use."""

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

__all__ = ["SANITIZERS", "Missing", "Sanitizer", "build", "preloaded"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "sanitizers"
CXX = os.environ.get("CXX") or "g++"
# As in setup.py, but for what the sanitizers need; with assertions, an index beyond the end of a vector is seen too.
FLAGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", "-std=c++20", "-ffp-contract=off", "-fPIC"]

STACKS = "stack_trace_format='    #%n %L'"  # files and lines; torch's function names fill pages


class Missing(Exception):
    """Something the build needs is not installed."""


@dataclass(frozen=True)
class Sanitizer:
    """One build.

    Attributes:
        name: what the command line calls it.
        flags: for compiler and linker.
        runtimes: what has to be in the process before Python is.
        options: the environment it runs in.
    """

    name: str
    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    options: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        "address",
        ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fopenmp"),
        ("libasan.so", "libstdc++.so"),  # the second, or exceptions are not followed
        {"ASAN_OPTIONS": f"detect_leaks=0:exitcode=99:{STACKS}", "UBSAN_OPTIONS": f"print_stacktrace=1:{STACKS}"},
    ),
    "thread": Sanitizer(
        "thread",
        ("-fsanitize=thread", "-fopenmp-simd", f"-I{Path(__file__).parent / 'threads'}"),
        ("libtsan.so", "libstdc++.so"),
        {"TSAN_OPTIONS": f"{STACKS}:ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=99"},
    ),
}


def build(sanitizer: Sanitizer) -> Path:
    """Compile what has changed since the last time; returns the library.

    Raises:
        Missing: there is no compiler, or it lacks the sanitizer's runtime.
        RuntimeError: the sources do not compile.
    """
    preloaded(sanitizer)
    folder = FOLDER / sanitizer.name
    folder.mkdir(parents=True, exist_ok=True)
    folders = (ROOT / "csrc", ROOT / "csrc" / "cpu")
    sources = sorted(path for source in folders for path in source.glob("*.cpp"))
    headers = sorted(path for source in folders for path in source.glob("*.h"))
    headers += [*ROOT.glob("csrc/cpu/ops/*.cpp"), *Path(__file__).parent.glob("threads/**/*.h")]  # as ops.cpp has them
    compile_with = [CXX, *FLAGS, *sanitizer.flags]
    compile_with += [f"-isystem{path}" for path in include_paths()]
    known = _digest(headers, torch.__version__, *compile_with)

    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(
            pool.map(
                lambda source, made: _make(made, _digest([source], known), [*compile_with, "-c", str(source)]),
                sources,
                objects,
            )
        )
    library = folder / "native.so"
    link = [CXX, "-shared", *sanitizer.flags, *map(str, objects)]
    link += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    _make(library, _digest(objects, known), link)
    return library


def preloaded(sanitizer: Sanitizer) -> list[str]:
    """The files of the sanitizer's runtime, for LD_PRELOAD.

    Raises:
        Missing: one of them is not there.
    """
    found = []
    for name in sanitizer.runtimes:
        try:
            command = [CXX, f"-print-file-name={name}"]
            path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise Missing(f"no GCC to ask for {name}: {error}") from None
        if not Path(path).is_absolute():
            raise Missing(f"{CXX} has no {name}; install the package with GCC's sanitizers")
        found.append(path)
    return found


def _make(target: Path, digest: str, command: list[str]) -> None:
    """Run the command, which writes the target, unless the target was made by the same one from the same files."""
    stamp = target.with_name(f"{target.name}.digest")
    if target.exists() and stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    stamp.write_text(digest)


def _digest(paths: list[Path], *more: str) -> str:
    digest = hashlib.sha256("\n".join(more).encode())
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
