"""Which build of torch is installed: says so before gigabytes come, and finds the CPU build when asked for it."""

import json
import os
import re
import time

from checkout import LOGS, VENV, Choices, installed, pins, pip
from steps import Log, SetUpError

__all__ = ["facts", "install"]

NOTICE = """
    The package index offers torch with CUDA: {count} packages more, about 3 GB to download and 7 GB on disk.
    On a machine without a GPU the CPU build (about 0.2 GB) is enough. Stop with Ctrl-C and choose it with
        make demo TORCH=cpu TORCH_INDEX=<URL>     the URL is what PyTorch's install page shows for "CPU"
    To go on without this pause: TORCH=any. Going on in {wait} s ... """
NO_CPU_BUILD = """TORCH=cpu, but the package index only offers torch with CUDA. Name an index with CPU builds:
    make ... TORCH=cpu TORCH_INDEX=<URL>      the URL is what PyTorch's install page shows for "CPU"
or put the wheel of the CPU build into a folder and set PIP_FIND_LINKS=<folder>."""
WAIT = 10


def facts(choices: Choices) -> object:
    """The pinned and the installed version, and whether the build is another one than asked for."""
    return [pins()["torch"], installed().get("torch"), choices["TORCH"] == "cpu" and _has_cuda()]


def install(log: Log, choices: Choices) -> str:
    """Install the pinned torch; before CUDA packages come, say so."""
    index = os.environ.get("TORCH_INDEX")
    wanted = [*pins()["torch"], *(["-i", index] if index else [])]
    if "torch" in installed():
        wanted.append("--force-reinstall")
    count = _cuda_packages(log, wanted)
    if count and choices["TORCH"] == "cpu":
        raise SetUpError(NO_CPU_BUILD)
    if count and choices["TORCH"] != "any":
        print(NOTICE.format(count=count, wait=WAIT), end="", flush=True)
        time.sleep(WAIT)
    log.call(pip("install", *wanted))
    return f"installed ({installed()['torch']})"


def _cuda_packages(log: Log, wanted: list[str]) -> int:
    """How many packages for CUDA pip would bring; it reads metadata for this and downloads no wheel."""
    report = LOGS / "torch-report.json"
    log.call(pip("install", "--dry-run", "--quiet", "--report", report, *wanted))
    names = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    return sum(name.startswith(("nvidia", "cuda", "triton")) for name in names)


def _has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, by its own version file."""
    texts = [path.read_text() for path in VENV.glob("lib/python*/site-packages/torch/version.py")]
    return any(re.search(r"^cuda\b[^=]*= *['\"]", text, re.MULTILINE) for text in texts)
