"""Where the CUDA toolkit lies. torch and CMake go by the place of nvcc, and one on PATH may be a script or a link."""

import os
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["find_toolkit"]

USUAL = Path("/usr/local/cuda")


def find_toolkit() -> Path | None:
    """The folder with nvcc and the runtime's headers: CUDA_HOME, CUDA_PATH, nvcc's own, the usual one; or None."""
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return next((folder for folder in [*named[:1], *_of_nvcc(), USUAL] if _is_toolkit(folder)), None)


def _of_nvcc() -> list[Path]:
    """The folders that nvcc on PATH may belong to: above it, and the one that it names itself."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return []
    try:
        done = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    except OSError:  # of another machine
        return []
    top = re.search(r"^#\$ TOP=(.+)$", done.stdout + done.stderr, re.MULTILINE)
    return [Path(nvcc).absolute().parents[1], *([Path(top[1]).resolve()] if top else [])]


def _is_toolkit(folder: Path) -> bool:
    return (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda_runtime.h").exists()
