"""One training run of the demonstration: its command, its log, and what to do when it fails."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "JobError", "environment", "horovodrun"]

STEP = re.compile(r"step (\d+)/(\d+)")
TAG = re.compile(
    r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>:"
)  # horovodrun names the rank at the start of each piece of output


class JobError(RuntimeError):
    """A job ended with an error or took too long; the message shows the end of its log and what to try."""


@dataclass(frozen=True)
class Job:
    """A run of a training script under ``horovodrun``.

    Attributes:
        name: what it is called on the screen and in the name of its log.
        command: what is run.
        log: where its output goes.
        time_limit: seconds after which it is stopped.
    """

    name: str
    command: list[str]
    log: Path
    time_limit: float

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Run it to its end; ``progress(step, steps)`` is called as it goes."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        late = threading.Event()
        with self.log.open("w") as log, self._start() as process:
            log.write(f"$ {shlex.join(self.command)}\n")
            watch = threading.Timer(self.time_limit, lambda: (late.set(), _end(process)))
            watch.start()
            try:
                for line in process.stdout or ():
                    log.write(_untagged(line))
                    if found := STEP.search(line):
                        progress(int(found[1]), int(found[2]))
                process.wait()
            finally:
                watch.cancel()
                _end(process)
        if process.returncode != 0:
            raise JobError(self._failure("took too long" if late.is_set() else f"exit status {process.returncode}"))

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment(),
            start_new_session=True,
        )

    def _failure(self, reason: str) -> str:
        tail = "".join(f"    {line}\n" for line in self.log.read_text().splitlines()[-25:])
        return (
            f"{self.name} failed: {reason} (time limit {self.time_limit:.0f} s)\nThe end of {self.log}:\n\n{tail}\n"
            f"What to try:\n  * {sys.executable} -m ringprune doctor    shows what is built and found\n"
            f"  * the job by itself:\n    {shlex.join(self.command)}\n"
            "  * a busy or slow machine: --time-limit SECONDS"
        )


def _untagged(line: str) -> str:
    """A line with the rank it came from once at its start, where it came from a rank; nothing if nothing is left."""
    rank, text = TAG.match(line), TAG.sub("", line)
    if rank is None or not text.strip():
        return text.lstrip("\n")
    return f"[{rank[1]}] {text}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a job that is still going: first politely, so that mpirun ends its ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(timeout=5)


def horovodrun(ranks: int, script: Path, *options: str) -> list[str]:
    """The command that runs ``script`` on ``ranks`` ranks of this machine with the Python that runs now."""
    launcher = shutil.which("horovodrun", path=environment()["PATH"])
    if launcher is None:
        raise FileNotFoundError(
            "horovodrun was not found beside this Python or on PATH: mpi_scripts/environment/install_horovod.sh"
        )
    return [launcher, "-np", str(ranks), sys.executable, str(script), *options]


def environment() -> dict[str, str]:
    """The environment of a job: the launchers beside this Python come first, and ranks share the cores.

    One thread per rank, and a rank that waits for a message lets others run: more than twice as fast on busy cores.
    """
    shared = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    beside = str(Path(sys.executable).parent)
    return {**shared, **os.environ, "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])}
