"""Keeps a Dispatch going while the program computes: a thread that does what is due, and waits for nothing."""

import atexit
import logging
import sys
import threading
import time
from collections.abc import Collection
from contextlib import nullcontext
from types import TracebackType

import torch

from ringprune.comm.waiting import waiting_for
from ringprune.exchange.dispatch import Dispatch

__all__ = ["Driver"]

SHORTEST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH = 50e-6, 5e-4, 1.3

STALL = 5.0
"""Seconds without any progress after which a rank waits inside the library, which knows time limits and dead ranks."""

TOLD_AFTER = 60.0
"""Seconds of waiting at the end of the program that are told, and again when it has been twice as long."""

_HINT = "another rank is gone, or has made fewer steps. Call synchronize() after the last step to have errors raised"

_log = logging.getLogger("ringprune")


class Driver:
    """Shares a Dispatch, and the exchange behind it, between the program's thread and its own.

    What one of them does with either it does inside ``with driver:``.

    Args:
        dispatch: what is kept going.
        device: where gradients live; on a GPU the thread works on the stream that is current now, after what the
            program's current stream was given when it handed a bucket over.
        threaded: have a thread; otherwise things happen when the program comes by.
    """

    def __init__(self, dispatch: Dispatch, device: torch.device, *, threaded: bool) -> None:
        self._dispatch, self._threaded = dispatch, threaded
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" and threaded else None
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Dispatch:
        self._lock.acquire()
        return self._dispatch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def follow(self) -> None:
        """What the thread does from now on comes after what the program's current stream was given; inside ``with``."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def go(self) -> None:
        """Something is ready: do what can be done without waiting, here or in the thread."""
        if not self._threaded:
            while self._dispatch.progress():
                pass
            return
        if self._thread is None:
            # A daemon: a message that never comes must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="ringprune schedule", daemon=True)
            self._thread.start()
            atexit.register(self._end)  # before the communicator ends, which was there before
        self._wake.set()

    def wait_for(self, buckets: Collection[int]) -> None:
        """Return when finishing these buckets would not wait, or would wait inside the library.

        Raises:
            CommunicatorError: as the communicator raises it.
        """
        what = f"the averages of {len(buckets)} buckets, from bucket {min(buckets, default=0)} on"
        with waiting_for(what, self._dispatch.rank) if self._threaded else nullcontext():
            self._wait_for(buckets)
        if self._stream is not None:  # what the thread has copied comes before what the program does with it
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _wait_for(self, buckets: Collection[int]) -> None:
        since, pause = time.monotonic(), 0.0
        while True:
            with self._lock:
                self._raise()
                if all(map(self._dispatch.reduced, buckets)):
                    return
                stalled = not self._threaded or time.monotonic() - since > STALL
                if self._dispatch.progress(wait=stalled):
                    since, pause = time.monotonic(), 0.0
                    continue
                if stalled and all(bucket in self._dispatch.sent for bucket in buckets):
                    return
            pause = min(max(pause * PAUSE_GROWTH, SHORTEST_PAUSE), LONGEST_PAUSE)
            time.sleep(pause)

    def run_out(self) -> None:
        """Start all messages that the step still has; all its buckets are ready."""
        while True:
            with self._lock:
                self._raise()
                if self._dispatch.idle:
                    return
                if self._dispatch.progress(wait=not self._threaded):
                    continue
            time.sleep(SHORTEST_PAUSE)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self._end)
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _end(self) -> None:
        """At the end of the program: let the messages of its last step go out, for which other ranks wait.

        However late they are; but for a program that ended with an error, or in the middle of a step.
        """
        failed = getattr(sys, "last_value", None) is not None
        start, told_after = time.monotonic(), TOLD_AFTER
        while not failed and self._error is None and self._dispatch.complete and not self._dispatch.quiet:
            time.sleep(LONGEST_PAUSE)
            if (waited := time.monotonic() - start) > told_after:
                told_after *= 2
                _log.warning(
                    "the program has waited %.0f s to end, for the messages of its last step: %s", waited, _HINT
                )
        if not failed and self._error is not None:
            _log.error("the last step was not made to its end (%s): %s", self._error, _HINT)
        self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._loop()

    def _loop(self) -> None:
        pause = 0.0
        while not self._closed:
            with self._lock:
                try:
                    progressed, quiet = self._dispatch.progress(), self._dispatch.quiet
                except Exception as error:
                    self._error, progressed, quiet = error, False, True
            if quiet:
                self._wake.wait()
                self._wake.clear()
                if self._error is not None:
                    return
            elif not progressed:
                pause = min(max(pause * PAUSE_GROWTH, SHORTEST_PAUSE), LONGEST_PAUSE)
                time.sleep(pause)
            else:
                pause = 0.0
