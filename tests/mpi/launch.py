"""Running a test program as a real job, under mpirun, horovodrun or torchrun, with a time limit that holds."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

Launcher = Literal["mpirun", "horovodrun", "horovodrun-gloo", "torchrun", "alone"]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # not resolved: in a virtual environment python is a link out of it
TAIL_LINES = 40  # of each rank
UNTAGGED_LINES = 100  # torchrun tags nothing, and says much itself
# Unbuffered ranks write a line in pieces, and mpirun tags each piece.
INNER_TAG = re.compile(r"(?<=[^\n])\[\d+,\d+\]<std(?:out|err)>:")
RANK_TAG = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>:")  # mpirun --tag-output and horovodrun

COMMANDS: dict[Launcher, list[str]] = {
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "--tag-output", "-np"],
    "horovodrun": ["horovodrun", "--mpi", "-np"],
    "horovodrun-gloo": ["horovodrun", "--gloo", "-np"],
    "torchrun": ["torchrun", "--standalone", "--no-python", "--nproc-per-node"],
    "alone": ["mpirun"],  # one process without a launcher; but where there is no mpirun there is no MPI
}


ranks_may_start = True
"""Set by conftest.py for each test."""


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Attributes:
        returncode: of the launcher; None where the job was ended at its time limit.
        output: what all ranks and the launcher wrote, in the order it came.
        seconds: how long it ran.
    """

    returncode: int | None
    output: str
    seconds: float

    def tails(self) -> str:
        """The last lines of each rank, then those of the launcher."""
        lines: dict[str, list[str]] = {}
        for line in self.output.splitlines():
            tag = RANK_TAG.match(line)
            lines.setdefault(f"rank {tag[1]}" if tag else "launcher", []).append(line[tag.end() if tag else 0 :])
        return "\n".join(f"--- {who}\n" + "\n".join(lines[who][-_shown(who) :]) for who in sorted(lines, reverse=True))


def _shown(who: str) -> int:
    return UNTAGGED_LINES if who == "launcher" else TAIL_LINES


def run_job(
    module: str,
    *arguments: str,
    np: int = 2,
    launcher: Launcher = "mpirun",
    timeout: float = 120.0,
    check: bool = True,
    environment: dict[str, str] | None = None,
) -> Job:
    """Run ``python -m module arguments...`` on ``np`` ranks and return what came of it.

    Args:
        module: name of a module, for example ``tests.mpi.jobs.contract``; or the path of a script ending in ``.py``.
        *arguments: the program's.
        np: number of ranks.
        launcher: what starts them; ``"alone"`` is one rank without any. What is not installed skips the test.
        timeout: seconds after which everything the job has started is killed. Programs that call
            :func:`tests.mpi.inside.watchdog` end themselves a little earlier, with their stacks.
        check: fail the test where the job fails; False leaves that to the caller.
        environment: variables added to the inherited ones.
    """
    assert ranks_may_start or launcher == "alone", "mark the test with pytest.mark.ranks, and name it in conftest.py"
    program = [sys.executable, *([module] if module.endswith(".py") else ["-m", module]), *arguments]
    started_by = [_tool(launcher), *COMMANDS[launcher][1:], str(np)]
    command = program if launcher == "alone" else [*started_by, *program]
    job = _run(command, job_environment(timeout) | (environment or {}), timeout)
    if check and job.returncode != 0:
        ending = f"reached its limit of {timeout} s" if job.returncode is None else f"exited with {job.returncode}"
        pytest.fail(f"{' '.join(command)}\n{ending} after {job.seconds:.1f} s\n{job.tails()}", pytrace=False)
    return job


def _tool(launcher: Launcher) -> str:
    name = COMMANDS[launcher][0]
    found = shutil.which(name, path=_path())
    if found is None or (name == "horovodrun" and importlib.util.find_spec("horovod") is None):
        pytest.skip(f"{name} is not installed")
    return found


def _path() -> str:
    return f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"


def job_environment(timeout: float) -> dict[str, str]:
    """The environment of a job that is to end after ``timeout`` seconds."""
    return os.environ | {
        "PATH": _path(),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores: the one waited for gets the core
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "RINGPRUNE_TEST_SECONDS": str(max(1.0, timeout - 5)),
    }


def _run(command: list[str], environment: dict[str, str], timeout: float) -> Job:
    start = time.monotonic()
    # Output goes to a file: a pipe would keep us reading for as long as any process of the job lives.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        returncode: int | None
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                _kill_tree(process)
        output.seek(0)
        text = INNER_TAG.sub("", output.read().decode(errors="replace"))
    return Job(returncode, text, time.monotonic() - start)


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher and all it has started; launchers put ranks into process groups of their own."""
    import psutil  # here: conftest.py reads this file, also where there is only pytest

    launcher = psutil.Process(process.pid)
    everything = [*launcher.children(recursive=True), launcher]
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(everything, timeout=10)
