"""Work on host memory shared out among as many threads as torch may use; they wait for it without spinning."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

__all__ = ["FEWEST", "in_parts", "side_by_side"]

FEWEST = 1 << 16
"""Entries worth a thread: some hundred microseconds of work."""


def in_parts(count: int, block: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(begin, end)`` for parts of ``range(count)``, side by side.

    Args:
        count: entries.
        block: parts begin at its multiples.
        work: does its part without the GIL.
    """
    parts = max(1, min(torch.get_num_threads(), count // FEWEST))
    size = max(1, -(-count // (parts * block))) * block
    begins = range(0, max(count, 1), size)
    side_by_side([functools.partial(work, begin, min(begin + size, count)) for begin in begins])


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Do all of them, the first in this thread; returns when all are done, and raises what one of them raises."""
    others: list[Future[None]] = []
    for done, task in enumerate(tasks[1:], 1):
        try:
            others.append(_pool().submit(task))
        except RuntimeError:  # the main thread has ended: Python starts no work any more
            for left in tasks[done:]:
                left()
            break
    tasks[0]()
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ringprune")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
