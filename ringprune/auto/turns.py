"""Turns of a course, of which one is taken after each step of training."""

import math
from collections.abc import Generator

__all__ = ["Course", "steps_within", "wait_for_steps"]

Course = Generator[None, None, None]


def wait_for_steps(steps: int) -> Course:
    """Let so many steps pass."""
    for _ in range(steps):
        yield


def steps_within(bounds: tuple[int, int, float], pace: float) -> int:
    """As many steps as take some seconds: ``bounds`` are the least, the most and the seconds; ``pace`` is a step's."""
    least, most, seconds = bounds
    return min(most, max(least, math.ceil(seconds / max(pace, 1e-9))))
