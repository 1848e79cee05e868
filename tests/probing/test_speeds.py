"""Ranks that are measured at once: what waiting for processors adds is told, evenly, and the slowest rank counts."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from ringprune.bench.stopwatch import Call, Sample, WallClock
from ringprune.prediction import CPU
from ringprune.probing import speeds
from ringprune.probing.speeds import measured, slowest_of

ENTRIES = 100_000


def _told() -> bool:
    """Whether the system tells; some kernels have the file and write zeros."""
    file = Path("/proc/self/schedstat")
    return file.exists() and not file.read_text().startswith("0 0 ")


class Made:
    """A stopwatch on which everything runs for a second, and each call every third time waits for three more."""

    def __init__(self) -> None:
        self._waits: defaultdict[Call, Iterator[float]] = defaultdict(lambda: cycle((0.0, 3.0, 0.0)))

    def time(self, call: Call) -> tuple[Sample, Any]:
        waits = next(self._waits[call])
        return Sample(1 + waits, waits / (1 + waits), waits), call()


def test_all_ranks_at_once_take_longer_by_what_they_wait_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "stopwatch", lambda device: Made())
    alone, together = (
        measured(0.25, 0.5, entries=ENTRIES, repetitions=3, together=at_once) for at_once in (False, True)
    )
    assert alone.accumulate == alone.copy == 1 / ENTRIES, "disturbed times are left out"
    # Of three times, 1, 4 and 1 seconds, three seconds something ran.
    assert together.accumulate == pytest.approx(2 / ENTRIES)
    assert together.encode_values == pytest.approx(dict.fromkeys(CPU.encode_values, 2 / (ENTRIES // 10)))
    assert (alone.shared, together.shared) == (1.0, pytest.approx(2.0))
    assert (together.message, together.tensor) == (pytest.approx(0.5), pytest.approx(1.0))


def test_entries_are_measured_where_they_lie_apart_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "stopwatch", lambda device: Made())
    found = measured(0.25, 0.5, entries=ENTRIES, repetitions=3)
    # Each call takes a second: one to take them, one to put them, less one of writing zeros.
    assert found.kept == pytest.approx({"apart": 1 / (2 * 0.01 * ENTRIES), "close": 1 / (2 * 0.1 * ENTRIES)})
    assert found.unite == pytest.approx({"apart": 1 / (0.01 * ENTRIES), "close": 1 / (0.1 * ENTRIES)})


def test_a_difference_of_disturbed_times_is_never_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"accumulate": 1.0, "copy": 1.0, "whole": 1.0, "fill": 3.0}
    found |= {f"{what} {where}": 1.0 for what in ("select", "take", "put") for where in ("apart", "close")}
    found["take close"] = 4.0
    monkeypatch.setattr(speeds, "_passes", lambda buckets, watch: dict(found))
    kept = measured(0.25, 0.5, entries=ENTRIES, repetitions=1).kept
    assert kept["close"] == pytest.approx(2 / (2 * 0.1 * ENTRIES))
    assert kept["apart"] == kept["close"], "alone it came to less than nothing"
    found["take close"] = 1.0
    assert measured(0.25, 0.5, entries=ENTRIES, repetitions=1).kept == {"apart": 0.0, "close": 0.0}


def test_the_slowest_rank_counts_in_each_speed() -> None:
    one = asdict(CPU) | {"accumulate": 1.0, "encode_values": {"fp16": 1.0, "int8": 4.0}}
    other = asdict(CPU) | {"copy": 2.0, "encode_values": {"fp16": 3.0, "int8": 2.0}}
    found = slowest_of([one, other])
    assert (found.accumulate, found.copy, found.fill) == (1.0, 2.0, CPU.fill)
    assert found.encode_values == {"fp16": 3.0, "int8": 4.0}


@pytest.mark.skipif(not _told(), reason="the system does not tell how long a thread waits")
def test_a_thread_that_shares_its_processor_is_held_up() -> None:
    allowed = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, busy.pid):
            os.sched_setaffinity(process, {min(allowed)})
        sample, total = WallClock().time(lambda: sum(range(10_000_000)))
    finally:
        os.sched_setaffinity(0, allowed)
        busy.kill()
        busy.wait()
    assert total == 49_999_995_000_000
    assert 0 < sample.held_up < sample.seconds
