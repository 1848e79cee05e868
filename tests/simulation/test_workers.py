"""Workers of several commands, each with one job, do not share a core while another idles."""

import os
import subprocess

import pytest

from ringprune.simulation.workers import quiet_cores

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
