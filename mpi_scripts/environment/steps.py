"""Runs the steps of the set-up: skips what is done, times and logs the rest, explains a failure."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Log", "SetUpError", "Step", "all_done", "run_steps"]

LAST_LINES = 25
NETWORK = "The network or the package index is out of reach: check connection, proxies and `pip config list`."
HINTS = {
    r"ensurepip is not available|No module named '?ensurepip": "Install venv: apt install python3-venv.",
    r"Python\.h: No such file": "Install Python's headers: apt install python3-dev, or dnf install python3-devel.",
    r"No space left on device|Disk quota exceeded": "The disk is full or a quota is reached: make room, then again.",
    r"NewConnectionError|NameResolutionError|ConnectTimeout|Temporary failure in name|Network is unreachable": NETWORK,
    r"No matching distribution found": (
        "The package index does not offer the pinned version for this Python and machine, or is out of reach:"
        " try another Python (delete .venv, then PYTHON=python3.11), or change the pin in constraints.txt."
    ),
    r"Could NOT find CUDAToolkit": (
        "torch is built for CUDA, and the CUDA toolkit of the nvcc on PATH is not whole: name another with"
        " CUDA_HOME=..., take nvcc off PATH where no GPU is to be used, or TORCH=cpu."
    ),
    r"(cusparse|cublas_v2|cusolverDn)\.h: No such file": "The CUDA toolkit lacks headers: install all, or TORCH=cpu.",
    r"Could NOT find MPI|mpi\.h: No such file": "MPI=system needs MPI with its headers: load its module.",
    r"internal compiler error|Killed signal|cc1plus.*Killed": "The compiler ran out of memory: try again with JOBS=1.",
    r"not enough slots": "mpirun found too few slots: mpi_scripts/environment/run lifts the limit for Open MPI 4.",
}


class SetUpError(Exception):
    """The set-up cannot go on; the message says what to try."""


class Log:
    """The full output of one step, in a file."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.path = path
        self.environment = environment

    def call(
        self, command: Sequence[str | Path], variables: Mapping[str, str] = {}, seconds: int | None = None
    ) -> None:
        """Run ``command`` with its output in the log; raise SetUpError when it fails.

        Args:
            command: the program and its arguments.
            variables: changes of the environment, for this command.
            seconds: its time limit.
        """
        words = [str(word) for word in command]
        with self.path.open("a") as file:
            file.write("$ " + " ".join(words) + "\n")
            file.flush()
            environment = {**self.environment, **variables}
            try:
                done = subprocess.run(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                raise SetUpError(f"{words[0]} did not end within {seconds} s.") from None
            except OSError as error:
                raise SetUpError(f"cannot start {words[0]}: {error.strerror}") from None
        if done.returncode:
            raise SetUpError(self.hint() or f"{Path(words[0]).name} ended with status {done.returncode}.")

    def text(self) -> str:
        """Everything logged so far."""
        return self.path.read_text(errors="replace")

    def hint(self) -> str:
        """What to try, where the log names a known trouble."""
        return "\n".join(advice for pattern, advice in HINTS.items() if re.search(pattern, self.text()))


@dataclass(frozen=True)
class Step:
    """One step. It is done as long as its facts are the ones written down when it last ended.

    Attributes:
        name: what its log file is called.
        title: what people read.
        facts: what the step depends on and what it leaves behind, as it is now.
        run: do it; may return a remark on what was done, for example ``"built"``.
    """

    name: str
    title: str
    facts: Callable[[], object]
    run: Callable[[Log], str]


def run_steps(steps: Sequence[Step], *, stamps: Path, logs: Path, environment: Mapping[str, str]) -> None:
    """Do in order what is not done yet, one printed line each."""
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.title} ... ", end="", flush=True)
        if _done(step, stamps):
            print("found", flush=True)
            continue
        start = time.monotonic()
        log = Log(logs / f"{step.name}.log", environment)
        try:
            remark = step.run(log)
        except SetUpError as error:
            _fail(log, str(error))
        print(f"{remark} in {time.monotonic() - start:.0f} s", flush=True)
        _write(stamps, step.name, _plain(step.facts()))


def all_done(steps: Sequence[Step], stamps: Path) -> bool:
    """Whether there is nothing to do."""
    return all(_done(step, stamps) for step in steps)


def _done(step: Step, stamps: Path) -> bool:
    return _read(stamps).get(step.name) == _plain(step.facts())


def _fail(log: Log, advice: str) -> None:
    """Print the first error and the end of the log, where it is, and what to try; then leave."""
    print("failed", flush=True)
    lines = [line.rstrip()[:200] for line in log.text().splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if re.search(r"CMake Error|\berror:", line)), len(lines))
    shown = lines[-LAST_LINES:]
    if first < len(lines) - LAST_LINES:
        shown = [*lines[first : first + LAST_LINES // 2], "...", *lines[-LAST_LINES // 2 :]]
    print("\n".join("    | " + line for line in shown), file=sys.stderr)
    sys.exit(f"\nSet-up stopped. Full log: {log.path}\n{advice}")


def _plain(facts: object) -> object:
    """Facts as JSON gives them back."""
    return json.loads(json.dumps(facts))


def _read(stamps: Path) -> dict[str, object]:
    try:
        return dict(json.loads(stamps.read_text()))
    except (OSError, ValueError):
        return {}


def _write(stamps: Path, name: str, facts: object) -> None:
    text = json.dumps({**_read(stamps), name: facts}, indent=1)
    fresh = stamps.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, stamps)
