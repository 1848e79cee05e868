"""Compiles every CUDA source as a check, for all GPUs that setup.py names; needs neither a GPU nor CUDA in torch."""

import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_toolkit import find_toolkit

ROOT = Path(__file__).resolve().parents[2]
GPUS = {75: ["sm_75"], 80: ["sm_80"], 90: ["sm_90"], 100: ["sm_100", "compute_100"]}  # of setup.py; the last is PTX
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
NVCC = ["-O3", "-std=c++20", "-fmad=false", "-Werror", "all-warnings", "-Xcompiler", ",".join(["-fPIC", *WARNINGS])]
FLOATS, HALVES = re.compile(r"\bst\.global[.\w]*\.v4\."), re.compile(r"\bst\.global[.\w]*\.v2\.[bu]32")
WIDE = {  # stores of four entries at once, in PTX
    "accumulate.cu": [FLOATS],
    "books.cu": [FLOATS],
    "put.cu": [FLOATS, HALVES],
    "share_momentum.cu": [FLOATS, HALVES],
}
HOST = ["g++", "-fsyntax-only", "-O3", "-std=c++20", "-ffp-contract=off", "-fopenmp", *WARNINGS]


def commands(cuda: Path, out: Path) -> dict[Path, list[str]]:
    """For each source the call that compiles it: kernels by nvcc, their host side by the C++ compiler."""
    import torch.utils.cpp_extension

    folders = [*torch.utils.cpp_extension.include_paths(), sysconfig.get_path("include"), str(cuda / "include")]
    includes = [flag for folder in folders for flag in ("-isystem", folder)]
    if not torch.version.cuda:
        includes.append("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")
    gpus = [f"-gencode=arch=compute_{gpu},code=[{','.join(codes)}]" for gpu, codes in GPUS.items()]
    nvcc = [str(cuda / "bin" / "nvcc"), *NVCC, *torch.utils.cpp_extension.COMMON_NVCC_FLAGS, *gpus, *includes, "-c"]
    kernels = {path: [*nvcc, str(path), "-o", str(out / f"{path.stem}.o")] for path in ROOT.glob("csrc/cuda/*.cu")}
    host = ROOT / "csrc/cuda/host.cpp"
    return kernels | {host: [*HOST, *includes, str(host)]}


def watched() -> list[Path]:
    """What the result depends on."""
    return [Path(__file__), *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]


def compiles(command: list[str]) -> bool:
    """Whether it does; what the compiler has to say is printed where it does not."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode == 0


def stores_wide(source: Path, command: list[str], out: Path) -> bool:
    """Whether it writes four entries at a time, of every size: nvcc may split stores, and says nothing."""
    ptx = out / f"{source.stem}.ptx"
    kept = [word for word in command[:-4] if not word.startswith("-gencode")]
    good = compiles([*kept, "-arch=compute_80", "-ptx", command[-3], "-o", str(ptx)])
    if good and not all(pattern.search(ptx.read_text()) for pattern in WIDE[source.name]):
        print(f"CUDA check: nvcc splits the stores of {source.name} into four", file=sys.stderr)
        return False
    return good


def main() -> int:
    """Compile them, as many at once as there are cores; 1 if any does not compile."""
    cuda = find_toolkit()
    if cuda is None:
        print("CUDA check skipped: there is no CUDA toolkit (nvcc on PATH, CUDA_HOME, or /usr/local/cuda).")
        return 0
    out = ROOT / "build" / "cuda"
    out.mkdir(parents=True, exist_ok=True)
    calls = commands(cuda, out)
    stamp = out / "compiled"  # nothing is compiled again while no source is newer
    if stamp.exists() and stamp.stat().st_mtime > max(path.stat().st_mtime for path in watched()):
        print(f"CUDA check: {len(calls)} sources compile, and nothing has changed since.")
        return 0
    started = time.time()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(calls, pool.map(compiles, calls.values()), strict=True))
    for source in (ROOT / "csrc/cuda" / name for name in WIDE):
        results[source] = results[source] and stores_wide(source, calls[source], out)
    failed = sorted(str(path.relative_to(ROOT)) for path, good in results.items() if not good)
    print(f"CUDA check: {len(results) - len(failed)} of {len(results)} sources compile. {' '.join(failed)}".rstrip())
    if not failed:
        stamp.touch()
        os.utime(stamp, (started, started))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
