"""Makes runs in worker processes until a plan asks for no more, each on a core of its own."""

import logging
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ringprune.bench import machine
from ringprune.simulation.spec import parse
from ringprune.simulation.store import Key, Store
from ringprune.simulation.tasks import TASKS, Data, Task
from ringprune.simulation.training import train

__all__ = ["Ahead", "Made", "Plan", "make_runs", "quiet_cores", "version_of"]

T = TypeVar("T")
Record = dict[str, Any]


@dataclass(frozen=True)
class Ahead:
    """What still has to be done, as far as can be foreseen.

    Attributes:
        runs: how many.
        steps: of all of them, by task.
    """

    runs: int
    steps: Mapping[str, int]


Plan = Callable[[Mapping[str, Record]], tuple[Sequence[Key], Ahead]]
"""From all finished runs to those that are wanted now, most wanted first, and what lies ahead, these included.

Finished runs may be among those wanted."""

PAUSE = 2.0
"""Seconds until a run is asked for again that another process is at."""


@dataclass(frozen=True)
class Made:
    """A run that has just been made.

    Attributes:
        key: which.
        record: what it came to; None where it failed.
        error: that it failed with.
        ahead: what is left.
    """

    key: Key
    record: Record | None
    error: str | None
    ahead: Ahead


def make_runs(plan: Plan, store: Store, jobs: int) -> Iterator[Made]:
    """Make what a plan wants and the store lacks.

    The plan is asked anew after every run. A run that failed is not tried again.

    Args:
        plan: what is wanted.
        store: where finished runs are, and go.
        jobs: how many are made at a time, each in a process of its own; 0 makes them in this one.

    Yields:
        Every run as it ends.
    """
    pool = _pool(jobs) if jobs else _Here()
    foreman = _Foreman(plan, store, pool, max(1, jobs))
    try:
        yield from foreman.work()
    finally:
        processes = list((getattr(pool, "_processes", None) or {}).values())  # which shutdown() forgets
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


class _Foreman:
    """Keeps the workers busy with what is wanted next."""

    def __init__(self, plan: Plan, store: Store, pool: Executor, jobs: int) -> None:
        self._plan, self._store, self._pool, self._jobs = plan, store, pool, jobs
        self._running: dict[Future[bool], Key] = {}
        self._failed: set[str] = set()
        self._elsewhere: dict[str, float] = {}  # until when a run that another process is at is left to it

    def work(self) -> Iterator[Made]:
        """Until nothing more is wanted."""
        wanted, _ = self._wanted()
        while wanted:
            self._submit(wanted)
            done, _ = wait(self._running, timeout=PAUSE, return_when=FIRST_COMPLETED)
            if not self._running:
                time.sleep(PAUSE)
            for future in done:
                yield from self._finish(future)
            wanted, _ = self._wanted()

    def _wanted(self) -> tuple[list[Key], Ahead]:
        records = self._store.records()
        keys, ahead = self._plan(records)
        left = {key.digest: key for key in keys if key.digest not in records and key.digest not in self._failed}
        return list(left.values()), ahead

    def _submit(self, wanted: Sequence[Key]) -> None:
        now, known = time.monotonic(), {key.digest for key in self._running.values()}
        for key in wanted:
            if len(self._running) == self._jobs:
                return
            if key.digest not in known and self._elsewhere.get(key.digest, 0) <= now:
                self._running[self._pool.submit(_make, str(self._store.path), asdict(key))] = key

    def _finish(self, future: "Future[bool]") -> Iterator[Made]:
        key, error = self._running.pop(future), None
        try:
            if not future.result():
                self._elsewhere[key.digest] = time.monotonic() + PAUSE
                return
        except BrokenExecutor:
            raise  # a worker was killed: so may be the next
        except Exception as problem:  # whatever it is, the other runs can be made
            error = f"{type(problem).__name__}: {problem}"
            self._failed.add(key.digest)
        yield Made(key, self._store.records().get(key.digest), error, self._wanted()[1])


class _Here(Executor):
    """Makes runs in this process, as they are submitted."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Run it now."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _pool(jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    cores: Any = context.Queue()
    own = quiet_cores()
    for number in range(jobs):
        cores.put(own[number % len(own)])
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(cores, os.getpid()))


def quiet_cores() -> list[int]:
    """The cores this process may use, first those that the fewest programs are bound to: workers of other commands."""
    bound = Counter[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            cores = os.sched_getaffinity(int(name))
            if len(cores) == 1 and Path(f"/proc/{name}/cmdline").read_bytes():  # empty: the kernel's own
                bound.update(cores)
    return sorted(os.sched_getaffinity(0), key=lambda core: (bound[core], core))


def version_of(task: Task) -> str:
    """The task's version and its data's digest: what a run depends on besides its settings."""
    return f"{task.version}-{_data(task.name).digest}"


@cache
def _data(name: str) -> Data:
    return TASKS[name].data()


# -- in a worker ------------------------------------------------------------------------------------------------------


def _start(cores: Any, parent: int) -> None:
    """The ranks are threads that take turns: a core of their own spares them from moving between cores."""
    torch.set_num_threads(1)
    logging.getLogger("ringprune").setLevel(logging.ERROR)  # advice on settings: the table says what they cost
    os.sched_setaffinity(0, {cores.get()})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End when the process ends that we work for, also where it was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _make(path: str, fields: Mapping[str, Any]) -> bool:
    """Make one run and add it to the store; False where another process has, or is at it."""
    key, store = Key(**fields), _store(path)
    with store.claim(key) as ours:
        if ours:
            store.add(key, run(key))
        return ours


@cache
def _store(path: str) -> Store:
    return Store(Path(path))


@cache
def made_on() -> Record:
    """Date and machine, which a record carries."""
    return {"date": time.strftime("%Y-%m-%d", time.gmtime())} | machine.facts(torch.device("cpu"))


def run(key: Key) -> Record:
    """Make one run, here and now."""
    task, spec = TASKS[key.task], parse(key.policy)
    outcome = train(
        task,
        spec,
        _data(key.task),
        rate=key.learning_rate,
        seed=key.seed,
        ranks=key.ranks,
        steps=key.steps,
    )
    return {"spec": str(spec)} | asdict(outcome) | {"made": made_on()}
