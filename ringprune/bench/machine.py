"""Says what was measured on: versions, processor, threads, who computes."""

import os
import platform
from pathlib import Path

import torch

import ringprune
from ringprune import ops

__all__ = ["cores", "describe", "facts"]


def cores() -> int:
    """The CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(device: torch.device) -> dict[str, str]:
    """What every row carries of the machine."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "backend": ops.backend(),
        "ringprune": ringprune.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def describe(device: torch.device) -> str:
    """The header of the table, for people."""
    told = facts(device)
    build = ops.native_build() or "not in use: the ops run in torch"
    return (
        f"ringprune {told['ringprune']}, torch {told['torch']}, Python {told['python']}\n"
        f"{told['processor']} ({told['capability']}), {torch.get_num_threads()} of {cores()} cores\n"
        f"native library: {build} ({told['backend']})"
    )


def _processor() -> str:
    """The processor's name as Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
