"""A communicator that notes when each of its messages was under way."""

import time
from collections.abc import Callable
from typing import Any

from replays.model import Event

__all__ = ["Noting"]

MESSAGES = ("broadcast", "allreduce", "allreduce_group", "allgather", "alltoall", "shift")


class Noting:
    """Hands everything on to a communicator.

    Args:
        comm: the communicator.
        note: told of each message when it has been seen to be there.
    """

    def __init__(self, comm: Any, note: Callable[[Event], None]) -> None:
        self._comm, self._note = comm, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return self._message(found) if name in MESSAGES else found

    def _message(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> "_Handle":
            start = time.perf_counter()
            return _Handle(call(*args, **options), lambda end: self._note(("network", options["name"], start, end)))

        return noted


class _Handle:
    def __init__(self, handle: Any, over: Callable[[float], None]) -> None:
        self._handle, self._over = handle, over
        self._told = False

    def done(self) -> bool:
        found: bool = self._handle.done()
        if found:
            self._tell()
        return found

    def wait(self) -> Any:
        result = self._handle.wait()
        self._tell()
        return result

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._over(time.perf_counter())
