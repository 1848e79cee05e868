"""Waiting for a collective by asking whether it is done, so that signals are handled and a time limit holds.

A library's own blocking wait keeps Python's signal handlers from running and cannot be given up. Here the process asks,
pauses and asks again; it knows what it waits for, and says so if it is told to stop (mpirun and horovodrun end the
surviving ranks with SIGTERM when one has died).
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from ringprune.comm.call import Call
from ringprune.errors import CommunicatorError

__all__ = ["FinishedHandle", "Waiter", "waiting_for"]

SHORTEST_PAUSE = 50e-6
LONGEST_PAUSE = 1e-3
PAUSE_GROWTH = 1.3
WARN_SECONDS = 60.0
"""A wait that takes so long is told, and again when it has taken twice as long as the last time."""

_PEER_GONE = ("shut down", "Connection closed by peer", "Connection reset by peer")  # Horovod's words, Gloo's

_log = logging.getLogger("ringprune")

_waits: dict[int, tuple[int, object]] = {}  # what the threads of this process wait for now: rank, and call or words
_wait_numbers = itertools.count()
_handler_considered = False
os.register_at_fork(after_in_child=_waits.clear)  # a forked child waits for nothing


@contextmanager
def waiting_for(what: object, rank: int) -> Iterator[None]:
    """Inside, a rank that is told to stop says what it waits for."""
    number = next(_wait_numbers)
    _waits[number] = rank, what
    try:
        _consider_handler()
        yield
    finally:
        del _waits[number]


class FinishedHandle:
    """A collective that needed no waiting, for example with one rank."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> Tensor:
        """Return the result."""
        return self._result


class Waiter:
    """How one communicator waits.

    Args:
        rank: number of this rank, for messages.
        timeout: seconds after which a wait is given up with a CommunicatorError; None is never.
        eager: seconds of asking without a pause, before the pauses begin: for libraries that only make progress
            when they are asked.
        library_errors: the exceptions of the library that become a CommunicatorError.
        longest_pause: seconds that pauses grow to.
    """

    def __init__(
        self,
        rank: int,
        timeout: float | None,
        eager: float,
        library_errors: tuple[type[Exception], ...],
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.eager = eager
        self.library_errors = library_errors
        self.longest_pause = longest_pause
        # Until a collective is done the library may write to its tensors, even if nobody holds the handle any more.
        self._under_way: set[_PolledHandle] = set()

    def handle(
        self, call: Call, *, done: Callable[[], bool], result: Callable[[], Tensor], kept: object
    ) -> "_PolledHandle":
        """A handle for a collective that is over when ``done()``, and then gives ``result()``.

        ``kept`` is what the library reads or writes until then.
        """
        handle = _PolledHandle(self, call, done, result, kept)
        self._under_way.add(handle)
        return handle

    def busy(self) -> bool:
        """Whether a collective is under way that the library may still work on."""
        return any(not handle.is_over() for handle in self._under_way)

    def has_ended_well(self) -> bool:
        """Whether the library is through with all that was started, and none of it has failed."""
        return all(handle.is_over() and handle.failure is None for handle in self._under_way)

    def failed(self, call: Call, error: Exception) -> CommunicatorError:
        """What to raise for the library's ``error``."""
        hint = ""
        if "with Join" in str(error):
            hint = (
                " hvd.join() does not go with sparse exchanges: every rank calls step() equally often, one that has "
                "run out of batches after zero_grad()"
            )
        elif any(sign in str(error) for sign in _PEER_GONE):
            hint = " Another rank has ended or failed: all ranks call step() equally often"
        return CommunicatorError(f"{call} failed on rank {self.rank}: {error}{hint}", alone=True)

    def finish_all(self, seconds: float) -> bool:
        """Let collectives end for which nobody waited; whether all have within ``seconds``."""
        deadline = time.monotonic() + seconds
        left = list(self._under_way)
        while left and time.monotonic() < deadline:
            left = [handle for handle in left if not handle.is_over()]
            time.sleep(SHORTEST_PAUSE)
        return not left

    def finish(self, handle: "_PolledHandle") -> Tensor:
        """Wait for the handle's collective and return its result."""
        call = handle.call
        try:
            if not handle.done():
                self._wait(call, handle.done)
            if handle.failure is not None:
                raise handle.failure
            result = handle.result()
        except CommunicatorError:
            raise
        except self.library_errors as error:
            raise self.failed(call, error) from error
        self._under_way.discard(handle)
        return result

    def _wait(self, call: Call, done: Callable[[], bool]) -> None:
        with waiting_for(call, self.rank):
            self._poll(call, done)

    def _poll(self, call: Call, done: Callable[[], bool]) -> None:
        start = time.monotonic()
        pause, warn_after = 0.0, WARN_SECONDS
        while not done():
            waited = time.monotonic() - start
            if self.timeout is not None and waited > self.timeout:
                raise CommunicatorError(
                    f"{call} was not done after {self.timeout} s on rank {self.rank}: "
                    "another rank is gone, slow, or in a different collective",
                    alone=True,
                )
            if waited > warn_after:
                warn_after *= 2
                self._warn(call, waited)
            if waited < self.eager:
                os.sched_yield()  # where ranks share a core, the one waited for gets it
            else:
                pause = min(max(pause * PAUSE_GROWTH, SHORTEST_PAUSE), self.longest_pause)
                time.sleep(pause)

    def _warn(self, call: Call, seconds: float) -> None:
        limit = "" if self.timeout is not None else "; connect(..., timeout=) makes an error of such a wait"
        _log.warning(
            "rank %d has waited for %s for %.0f s: another rank is slow, gone, or in a different collective. All ranks "
            "call step() equally often, one without a batch zero_grad() and step(), all or none load_state_dict()%s",
            self.rank,
            call,
            seconds,
            limit,
        )


class _PolledHandle:
    """A collective under way in a library."""

    def __init__(
        self, waiter: Waiter, call: Call, done: Callable[[], bool], result: Callable[[], Tensor], kept: object
    ) -> None:
        self.call = call
        self._done = done
        self.failure: Exception | None = None
        self.result = result
        self.kept = kept
        self._waiter = waiter
        self._outcome: Tensor | CommunicatorError | None = None

    def done(self) -> bool:
        """Whether :meth:`wait` would not wait; asking lets some libraries make progress."""
        return self._outcome is not None or self.is_over()

    def is_over(self) -> bool:
        """Whether the library is through with the collective, well or not; a wait that was given up does not count."""
        try:
            return self.failure is not None or self._done()
        except self._waiter.library_errors as error:
            self.failure = error  # libraries tell it once; wait() raises it
            return True

    def wait(self) -> Tensor:
        """Block until the collective is done and return its result; again, the same result or error."""
        if self._outcome is None:
            try:
                self._outcome = self._waiter.finish(self)
            except CommunicatorError as error:
                self._outcome = error
        if isinstance(self._outcome, CommunicatorError):
            raise self._outcome
        return self._outcome


def _consider_handler() -> None:
    """Take SIGTERM if nobody else has; only the main thread may, and once is enough."""
    global _handler_considered
    if _handler_considered or threading.current_thread() is not threading.main_thread():
        return
    _handler_considered = True
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _tell_and_stop)


def _tell_and_stop(signum: int, frame: FrameType | None) -> None:
    for rank, what in list(_waits.values()):
        # os.write: sys.stderr may be in the middle of a line when the signal comes.
        os.write(2, f"ringprune: rank {rank} stopped while waiting for {what}\n".encode())
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
