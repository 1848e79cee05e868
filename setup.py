"""Builds the native library from csrc/ when `pip install` runs; RINGPRUNE_BUILD says what to build.

    auto (default)   the CPU kernels, and the CUDA ones where torch is built for CUDA and a CUDA toolkit is found
    cpu, cuda        exactly that, or an error
    none             nothing; every operation runs in its torch reference

The library fits the torch it was built against. pip builds in an isolated environment where torch is hidden, so torch
is looked for in the environment that pip installs into. TORCH_CUDA_ARCH_LIST names the GPUs to compile for.
"""

import importlib.util
import os
import sys
import sysconfig
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
GPUS = "8.0;9.0;10.0+PTX"  # A100, H100 and H200, B200; what comes after them compiles the PTX when it is loaded
GPUS_BEFORE_CUDA_12_8 = "8.0;9.0+PTX"
CXX_FLAGS = ["-O3", "-g0", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra", "-Wno-unused-parameter"]
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-Xcompiler", "-ffp-contract=off,-fopenmp"]


def find_torch() -> ModuleType | None:
    """Import torch, also where pip's build isolation hides it; None where there is none."""
    if importlib.util.find_spec("torch") is None:
        sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        return None
    import torch.utils.cpp_extension

    return torch


def read_mode() -> str:
    """RINGPRUNE_BUILD, or an error that names what is allowed."""
    mode = os.environ.get("RINGPRUNE_BUILD") or "auto"
    if mode not in MODES:
        sys.exit(f"RINGPRUNE_BUILD={mode} is not one of {', '.join(MODES)}")
    return mode


def wants_cuda(mode: str, torch: ModuleType) -> bool:
    """Whether CUDA kernels are built: a matter of torch and toolkit, not of a GPU in this machine."""
    home = torch.utils.cpp_extension.CUDA_HOME
    lacking = {
        "a torch that is built for CUDA": torch.version.cuda,
        "a CUDA toolkit (nvcc, CUDA_HOME)": home,
    }
    missing = [what for what, found in lacking.items() if not found]
    if mode == "cuda" and missing:
        found = f"torch {torch.__version__}, CUDA_HOME={home}"
        sys.exit(f"RINGPRUNE_BUILD=cuda needs {' and '.join(missing)}; found {found}")
    return mode != "cpu" and not missing


def native_library(torch: ModuleType, cuda: bool) -> Extension:
    """The one shared library, ringprune/_native*.so, loaded with torch.ops.load_library."""
    sources = ["csrc/library.cpp", *map(str, sorted(Path("csrc/cpu").glob("*.cpp")))]
    flags = {"cxx": CXX_FLAGS}
    make = torch.utils.cpp_extension.CppExtension
    if cuda:
        make = torch.utils.cpp_extension.CUDAExtension
        sources += map(str, sorted([*Path("csrc/cuda").glob("*.cu"), *Path("csrc/cuda/host").glob("*.cpp")]))
        flags["nvcc"] = NVCC_FLAGS
        major, minor = map(int, torch.version.cuda.split(".")[:2])
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", GPUS if (major, minor) >= (12, 8) else GPUS_BEFORE_CUDA_12_8)
    return make("ringprune._native", sources, extra_compile_args=flags, extra_link_args=["-fopenmp"])


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
