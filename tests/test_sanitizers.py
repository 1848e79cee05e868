"""Ten seconds of random calls of the native kernels under AddressSanitizer; `make fuzz` goes on for longer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitizers.build import SANITIZERS, Missing, preloaded
from tests.sanitizers.calls import GENERATORS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the build takes a minute or two; afterwards it is kept in build/
def test_random_calls_find_nothing() -> None:
    """And every op was called, and compared with its reference; checksums with those of zlib."""
    try:
        preloaded(SANITIZERS["address"])
    except Missing as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.sanitizers", "address", "--seconds", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    called = re.findall(r"^  (\w+) +[1-9]\d* compared", done.stdout, re.MULTILINE)
    assert called == ["crc32", *GENERATORS], done.stdout[-2000:]
