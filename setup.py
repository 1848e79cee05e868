"""Builds the native library from csrc/ when `pip install` runs; RINGPRUNE_BUILD says what to build.

    auto (default)   the CPU kernels, and the CUDA ones where torch is built for CUDA and its CUDA toolkit is found
    cpu, cuda        exactly that, or an error
    none             nothing; every operation runs in its torch reference

The library fits the torch it was built against. pip builds in an isolated environment where torch is hidden, so torch
is looked for in the environment that pip installs into. TORCH_CUDA_ARCH_LIST names the GPUs to compile for.
"""

import importlib.util
import os
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

MODES = ("auto", "cpu", "cuda", "none")
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
NO_TORCH = f"""
{"*" * 100}
RingPrune is being installed WITHOUT its native library, because there is no torch in this environment.
It will work, slowly. To build the library: install torch first, then run, in RingPrune's source folder,
    {REBUILD}
{"*" * 100}
"""
GPUS = "7.5;8.0;9.0;10.0+PTX"  # T4, A100, H100 and H200, B200; later ones compile the PTX. None is before 7.0
GPUS_BEFORE_CUDA_12_8 = "7.5;8.0;9.0+PTX"
OLDEST_NVCC = (12, 1)  # kernel arguments of more than 4 KiB
CXX_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fopenmp",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
]
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-Xcompiler", "-ffp-contract=off,-fopenmp"]


def find_torch() -> ModuleType | None:
    """Import torch, also where pip's build isolation hides it; None where there is none."""
    if importlib.util.find_spec("torch") is None:
        sys.path += site_folders()
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        return None
    name_toolkit()
    import torch.utils.cpp_extension

    return torch


def name_toolkit() -> None:
    """CUDA_HOME where nobody has said it: torch takes the folder above nvcc, which may be a script on PATH."""
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent / "mpi_scripts" / "environment"))
    try:
        from cuda_toolkit import find_toolkit
    finally:
        del sys.path[0]
    if toolkit := find_toolkit():
        os.environ["CUDA_HOME"] = str(toolkit)


def site_folders() -> list[str]:
    """Where this Python finds packages when pip isolates nothing; a virtual environment may let the system's in."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    marker = Path(sys.prefix) / "pyvenv.cfg"
    shared = r"(?im)^include-system-site-packages\s*=\s*true"
    if not marker.exists() or re.search(shared, marker.read_text()):
        folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]
    return folders


def read_mode() -> str:
    """RINGPRUNE_BUILD, or an error that names what is allowed."""
    mode = os.environ.get("RINGPRUNE_BUILD") or "auto"
    if mode not in MODES:
        sys.exit(f"RINGPRUNE_BUILD={mode} is not one of {', '.join(MODES)}")
    return mode


def wants_cuda(mode: str, torch: ModuleType) -> bool:
    """Whether CUDA kernels are built: a matter of torch and toolkit, not of a GPU in this machine."""
    if mode == "cpu":
        return False
    built_for, home = torch.version.cuda, torch.utils.cpp_extension.CUDA_HOME
    missing = []
    if not built_for:
        missing.append("a torch that is built for CUDA")
    release = release_of(home)
    if release is None:
        missing.append("a CUDA toolkit with bin/nvcc and include/cuda_runtime.h (CUDA_HOME)")
    elif built_for and release.split(".")[0] != built_for.split(".")[0]:
        missing.append(f"the CUDA toolkit {built_for.split('.')[0]} that torch is built for, where nvcc is {release}")
    elif numbers(release) < OLDEST_NVCC:
        missing.append(f"nvcc {'.'.join(map(str, OLDEST_NVCC))} or newer, where it is {release}")
    if not missing:
        return True
    why = f"{' and '.join(missing)}; found torch {torch.__version__}, CUDA_HOME={home}"
    if mode == "cuda":
        sys.exit(f"RINGPRUNE_BUILD=cuda needs {why}")
    if built_for:
        print(f"RingPrune's CUDA kernels are left out. They need {why}", file=sys.stderr)
    return False


def release_of(home: str | None) -> str | None:
    """The release of a toolkit's nvcc, such as 13.0; None where it is not whole: images to run in have no compiler."""
    folder = Path(home or "")
    if not (folder / "include" / "cuda_runtime.h").exists():  # nvcc on PATH was a link or a script of another folder's
        return None
    try:
        done = subprocess.run([folder / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else None


def numbers(release: str) -> tuple[int, ...]:
    """A release that can be compared."""
    return tuple(map(int, release.split(".")[:2]))


def gpus(release: str) -> str:
    """What to compile for: TORCH_CUDA_ARCH_LIST, or all that nvcc of this release knows."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or (GPUS if numbers(release) >= (12, 8) else GPUS_BEFORE_CUDA_12_8)


SHARED_CXX = "-l:libstdc++.so.6"  # the one that torch loads


def shared_cxx() -> list[str]:
    """What makes the compiler use the C++ library that the process has anyway, where it would link a copy into ours.

    With two of them messages of errors come out cut short, or end the process.
    """
    compiler = (os.environ.get("CXX") or "c++").split()
    probe = ["-shared", "-fPIC", "-x", "c++", "-", "-x", "none"]
    source = b"#include <sstream>\nstd::string text(long n) { std::ostringstream to; to << n; return to.str(); }"
    with tempfile.TemporaryDirectory() as folder:
        for flags in ([], [SHARED_CXX]):
            out = Path(folder) / "probe.so"
            try:
                done = subprocess.run([*compiler, *probe, *flags, "-o", out], input=source, capture_output=True)
            except OSError:
                return []  # the build will tell
            if done.returncode == 0 and any(name in out.read_bytes() for name in (b"libstdc++.so", b"libc++.")):
                return flags
    print(
        f"{' '.join(compiler)} links no shared C++ library: errors may end the process. Set CXX to another compiler.",
        file=sys.stderr,
    )
    return []


def native_library(torch: ModuleType, cuda: bool) -> Extension:
    """The one shared library, ringprune/_native*.so, loaded with torch.ops.load_library."""
    sources = ["csrc/library.cpp", *map(str, sorted(Path("csrc/cpu").glob("*.cpp")))]
    flags = {"cxx": CXX_FLAGS}
    make = torch.utils.cpp_extension.CppExtension
    if cuda:
        make = torch.utils.cpp_extension.CUDAExtension
        sources += ["csrc/cuda/host.cpp", *map(str, sorted(Path("csrc/cuda").glob("*.cu")))]
        flags["nvcc"] = NVCC_FLAGS
        # nvcc's own release: torch goes with any of its major one, and knows GPUs that an older nvcc does not.
        os.environ["TORCH_CUDA_ARCH_LIST"] = gpus(release_of(torch.utils.cpp_extension.CUDA_HOME) or torch.version.cuda)
    included = sorted(str(path) for path in Path("csrc").rglob("*") if path.is_file())  # a change of any builds it anew
    links = ["-fopenmp", *shared_cxx()]
    return make("ringprune._native", sources, depends=included, extra_compile_args=flags, extra_link_args=links)


mode = read_mode()
torch = find_torch() if mode != "none" else None
if torch is None and mode in ("cpu", "cuda"):
    sys.exit(f"RINGPRUNE_BUILD={mode} needs torch in this environment: pip install torch, then {REBUILD}")
if torch is None and mode == "auto":
    print(NO_TORCH, file=sys.stderr)

extensions, commands = [], {}
if torch is not None:
    extensions.append(native_library(torch, wants_cuda(mode, torch)))
    commands["build_ext"] = torch.utils.cpp_extension.BuildExtension
setup(ext_modules=extensions, cmdclass=commands)
