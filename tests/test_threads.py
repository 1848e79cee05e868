"""Work shared out among threads: all of it is done once, what fails is told, and a forked process does it too."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringprune.threads import FEWEST, _pool, in_parts


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given(st.integers(0, 10 * FEWEST), st.integers(1, 3000), st.integers(1, 9))
def test_parts_are_all_there_is(count: int, block: int, number: int) -> None:
    before, parts = torch.get_num_threads(), []
    torch.set_num_threads(number)
    try:
        in_parts(count, block, lambda begin, end: parts.append((begin, end)))
    finally:
        torch.set_num_threads(before)
    parts.sort()
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count
    assert all(begin % block == 0 for begin, _ in parts)
    assert len(parts) <= max(1, min(number, count // FEWEST))


def test_parts_are_done_side_by_side(threads: Callable[[int], None]) -> None:
    """Each waits for the other: one thread alone would never come to an end."""
    threads(2)
    both = threading.Barrier(2, timeout=30)
    in_parts(2 * FEWEST, 1, lambda begin, end: both.wait() and None)


@pytest.mark.parametrize("failing", [0, FEWEST])
def test_what_fails_in_a_thread_is_raised(threads: Callable[[int], None], failing: int) -> None:
    threads(2)

    def work(begin: int, end: int) -> None:
        if begin == failing:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_parts(2 * FEWEST, 1, work)


def test_a_forked_process_has_threads_of_its_own(threads: Callable[[int], None]) -> None:
    """Those of its parent are not in it: it would wait for them for ever."""
    threads(2)
    in_parts(2 * FEWEST, 1, lambda begin, end: None)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        waiting = threading.Thread(
            target=lambda: in_parts(2 * FEWEST, 1, lambda begin, end: done.append(begin)), daemon=True
        )
        waiting.start()
        waiting.join(30)
        os._exit(0 if sorted(done) == [0, FEWEST] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_work_is_over_when_one_part_fails(threads: Callable[[int], None]) -> None:
    """Others went on writing into memory that the caller had back."""
    threads(3)
    done: list[int] = []

    def work(begin: int, end: int) -> None:
        if begin == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        done.append(begin)

    with pytest.raises(KeyboardInterrupt):
        in_parts(3 * FEWEST, 1, work)
    assert sorted(done) == [FEWEST, 2 * FEWEST]


@pytest.mark.parametrize("starts", [0, 1, 2])
def test_each_part_is_done_once_where_no_more_threads_can_be_started(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    """A pool queues work before it finds that it cannot start a thread: it was done twice, on what lay in its place."""
    threads(4)
    _pool.cache_clear()
    start, started, done = threading.Thread.start, [], []

    def limited(thread: threading.Thread) -> None:
        if len(started) == starts:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(20):
        in_parts(4 * FEWEST, 1, lambda begin, end: done.append(begin))
    monkeypatch.undo()
    in_parts(4 * FEWEST, 1, lambda begin, end: done.append(begin))
    time.sleep(0.1)
    assert sorted(done) == sorted([0, FEWEST, 2 * FEWEST, 3 * FEWEST] * 21)
    _pool.cache_clear()
