"""How long the rest may take is told from runs that tell it."""

from collections import Counter
from dataclasses import replace

from ringprune.simulation.progress import TELLING, _Clock
from ringprune.simulation.store import Key
from ringprune.simulation.workers import Ahead, Made

KEY = Key("digits", "1", "dense", 8, 0.1, 0, 2)


def made(steps: int, seconds: float, ahead: int, task: str = "digits") -> Made:
    record = {"seconds": seconds, "curve": [(steps, 0.0, 0.0)]}
    return Made(replace(KEY, task=task, steps=steps), record, None, Ahead(1, Counter({"digits": ahead})))


def test_a_probe_of_two_steps_says_nothing_about_a_whole_run() -> None:
    """It takes seconds to begin and to judge: five runs of minutes were said to take 4.5 hours."""
    clock = _Clock(1)
    probe = made(2, 6.0, 2048)
    clock.saw(probe)
    assert clock.left(probe) is None
    whole = made(2048, 200.0, 2048)
    clock.saw(whole)
    assert 200 <= (clock.left(whole) or 0) < 210


def test_a_task_that_was_only_probed_is_taken_to_be_like_those_seen() -> None:
    clock = _Clock(2)
    clock.saw(made(2, 6.0, 0))
    other = made(TELLING, 64.0, 128, task="charlstm")
    clock.saw(other)
    assert (clock.left(other) or 0) < 128 * 1.1
