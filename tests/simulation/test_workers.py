"""Workers of several commands, each with one job, do not share a core while another idles."""

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest

from ringprune.simulation.store import Key, Store
from ringprune.simulation.tasks import TASKS
from ringprune.simulation.workers import Ahead, make_runs, quiet_cores, version_of

MANY = 8  # more programs than other tests' batteries may bind to a core meanwhile


def test_a_core_that_another_command_s_workers_are_bound_to_comes_last() -> None:
    """Two commands with one job each took the same core half of the time, and both ran at half speed."""
    first, *others = quiet_cores()
    if not others:
        pytest.skip("there is one core")
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(MANY)]
    try:
        for sleeper in sleepers:
            os.sched_setaffinity(sleeper.pid, {first})
        now = quiet_cores()
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert sorted(now) == sorted([first, *others])
    assert now[-1] == first


def test_workers_end_where_what_asked_for_them_does(tmp_path: Path) -> None:
    """The run under way was made to its end first, minutes later, by a worker that nobody wanted any more."""
    short, long = (
        Key("digits", version_of(TASKS["digits"]), "dense", 2, 0.1, seed, steps)
        for seed, steps in enumerate((1, 200_000))
    )
    made = make_runs(lambda records: ([short, long], Ahead(2, {})), Store(tmp_path / "runs"), 2)
    assert next(made).key == short
    workers = [worker.pid for worker in multiprocessing.active_children()]
    assert workers
    made.close()
    until = time.monotonic() + 60
    while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, f"{alive} are still at the long one"
        time.sleep(0.1)
