"""Work on host memory shared out among as many threads as torch may use; they wait for it without spinning."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

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
    """Do each of them once, the first in this thread; returns when all are done, and raises what one of them raises."""
    here, others = [tasks[0]], []
    for task in tasks[1:]:
        other: Future[None] = Future()
        try:
            _pool().submit(_do, other, task)
        except RuntimeError:  # no thread could be started, or Python ends and starts none any more
            if other.cancel():  # it may have been queued all the same, and an idle thread may do it
                here.append(task)
                continue
        others.append(other)
    try:
        for task in here:
            task()
    finally:
        wait(others)  # they write into the caller's memory
    for other in others:
        other.result()


def _do(future: Future[None], task: Callable[[], None]) -> None:
    """Do a task, unless it was taken back."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        task()
    except BaseException as error:  # the caller raises it
        future.set_exception(error)
    else:
        future.set_result(None)


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ringprune")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
