"""The CUDA kernels, compiled for the CPU and run as blocks, warps and lanes: the tests of the ops without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.emulation import build

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(build.compiler() is None, reason="no g++ to compile the CUDA kernels for the CPU with")
@pytest.mark.skipif("RINGPRUNE_EMULATED" in os.environ, reason="this is the run it starts")
@pytest.mark.parametrize(
    ("flags", "tests"),
    [([], "tests/ops"), (["-DRINGPRUNE_TINY_SIZES"], "tests/ops/test_cuda.py")],
    ids=["as it is", "every way with small tensors"],
)
def test_cuda_kernels_on_the_cpu(flags: list[str], tests: str) -> None:
    library = build.build(ROOT / "build" / "emulated", [])
    if flags:
        library = build.build(ROOT / "build" / "-".join(["emulated", *flags]), flags, like=library.parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "emulated", tests],
        cwd=ROOT,
        env=os.environ | {"RINGPRUNE_NATIVE": "off", "RINGPRUNE_EMULATED": str(library)},
        capture_output=True,
        text=True,
        timeout=600,  # blocks may wait for each other for ever
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
