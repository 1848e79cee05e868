"""Loops that numba compiles, where what it compiles cannot be kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from ringprune.compiled import compiled

@compiled
def successor(number):
    return number + 1

print(successor(3))
"""
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("blocks", "kept"), [("unlimited", True), ("0", False)])
def test_a_full_disk_ends_no_step(blocks: str, kept: bool, tmp_path: Path) -> None:
    """The folder could be written to, its disk was full: the first message of training was an OSError on one rank."""
    (tmp_path / "script.py").write_text(SCRIPT)
    cache = tmp_path / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", f'ulimit -f {blocks} && exec "$@"', "sh", sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert any(cache.rglob("*.nbc")) == kept
