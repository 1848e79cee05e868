"""What people see while runs are made: a line for each that ended, a bar, and how long the rest may take."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from typing import Any

from ringprune.simulation.spec import parse
from ringprune.simulation.workers import Made

__all__ = ["duration", "progress"]

Record = dict[str, Any]

TELLING = 64
"""Steps from which on runs tell how long others take."""


def progress(runs: Iterable[Made], jobs: int) -> int:
    """Show runs as they end.

    Returns:
        An exit status: 0 when none failed, 1 when some did, 130 when somebody stopped.
    """
    failures, clock = 0, _Clock(max(1, jobs))
    with _bar() as show:
        try:
            for made in runs:
                failures += made.error is not None
                clock.saw(made)
                left = clock.left(made)
                share = 0.0 if left is None else clock.worked / max(1e-9, clock.worked + left)
                show(_line(made), _rest(made.ahead.runs, left), share)
        except KeyboardInterrupt:
            print("stopped; the same command continues", file=sys.stderr)
            return 130
        except BrokenExecutor:
            print(
                "a worker was killed, often for memory; the same command continues, --jobs 1 takes less",
                file=sys.stderr,
            )
            return 1
    return 1 if failures else 0


class _Clock:
    """How long runs take, by what those took that were made since the start."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self.worked = jobs, 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps: dict[str, int] = defaultdict(int)

    def saw(self, made: Made) -> None:
        """A run has ended."""
        if made.record is not None:
            self.worked += made.record["seconds"] / self._jobs
            self._seconds[made.key.task] += made.record["seconds"]
            self._steps[made.key.task] += made.record["curve"][-1][0] or made.key.steps

    def left(self, made: Made) -> float | None:
        """Seconds that what is ahead may take; tasks not yet seen are taken to be like those seen.

        None where all that was seen were probes of a few steps, which say how long a run takes to begin and to judge.
        """
        if sum(self._steps.values()) < TELLING and made.ahead.runs:
            return None
        overall = sum(self._seconds.values()) / max(1, sum(self._steps.values()))
        each = {task: self._seconds[task] / steps for task, steps in self._steps.items() if steps >= TELLING}
        return sum(steps * each.get(task, overall) for task, steps in made.ahead.steps.items()) / self._jobs


@contextmanager
def _bar() -> Iterator[Callable[[str, str, float], None]]:
    """A bar on standard error, where that is a terminal and tqdm is there; otherwise lines alone."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda line, rest, share: print(f"{line}  [{rest}]", file=sys.stderr, flush=True)
        return
    with tqdm(total=1.0, file=sys.stderr, disable=None, bar_format="{desc} {bar} {percentage:.0f} %") as bar:

        def show(line: str, rest: str, share: float) -> None:
            tqdm.write(f"{line}  [{rest}]" if bar.disable else line, file=sys.stderr)
            bar.set_description_str(rest, refresh=False)
            bar.n = share
            bar.refresh()

        yield show


def _rest(runs: int, seconds: float | None) -> str:
    about = "" if seconds is None else f", about {duration(seconds)}"
    return f"{runs} runs left{about}" if runs else "done"


def _line(made: Made) -> str:
    key = made.key
    name = f"{key.task} {parse(key.policy)} rate {key.learning_rate:g} seed {key.seed}"
    if made.record is None:
        return f"{name}: FAILED: {made.error}"
    return f"{name}: {_outcome(made.record)} in {duration(made.record['seconds'])}"


def _outcome(record: Record) -> str:
    ratio = f", wire ratio {record['dense_bytes'] / record['bytes_sent']:.1f}" if record["bytes_sent"] else ""
    return ("diverged" if record["value"] is None else f"{record['value']:.4f}") + ratio


def duration(seconds: float) -> str:
    """For people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
