"""Compiles every CUDA source with nvcc as a check; neither a GPU nor a CUDA build of torch is needed."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-arch=sm_90", "-Xcompiler", "-fPIC", "-Werror", "all-warnings"]


def command(nvcc: str, source: Path, out: Path) -> list[str]:
    """The call of nvcc for one source."""
    import torch.utils.cpp_extension

    folders = [*torch.utils.cpp_extension.include_paths(), sysconfig.get_path("include")]
    macros = [] if torch.version.cuda else ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    includes = [flag for folder in folders for flag in ("-isystem", folder)]
    return [nvcc, "-c", *FLAGS, *macros, *includes, str(source), "-o", str(out / f"{source.stem}.o")]


def main() -> int:
    """Compile them one by one; 1 if any does not compile."""
    sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
    nvcc = shutil.which("nvcc")
    if not sources or not nvcc:
        reason = "there is no nvcc on PATH" if sources else "csrc/cuda has no sources yet"
        print(f"CUDA check skipped: {reason}.")
        return 0
    out = ROOT / "build" / "cuda"
    out.mkdir(parents=True, exist_ok=True)
    failed = [source.name for source in sources if subprocess.run(command(nvcc, source, out)).returncode]
    print(f"CUDA check: {len(sources) - len(failed)} of {len(sources)} sources compile. " + " ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
