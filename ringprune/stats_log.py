"""What an optimizer's statistics are at intervals of a run: a file of JSON lines, and numbers for any other logger."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.validation import whole_number

__all__ = ["StatsLog", "scalars"]


class HasStats(Protocol):
    """A ``DistributedOptimizer``, or what ``ddp_hook`` makes."""

    def stats(self) -> dict[str, Any]:
        """Counters since construction."""
        ...


class Writer(Protocol):
    """For example ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Note one number."""
        ...


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of ``optimizer.stats()`` by name, those inside others as ``"seconds/select"``: for any logger."""
    found: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


class StatsLog:
    """Writes one line of JSON every so many steps; ``ringprune report FILE`` reads it.

    Nothing is sent: make one on rank 0, or on every rank with a file of its own. A line has ``calls`` of :meth:`step`,
    ``elapsed_seconds``, what the call was given, and all of :func:`scalars`, counted since the optimizer was built.

    Args:
        path: the file; one that is there is overwritten.
        optimizer: whose ``stats()`` are written.
        every: steps from one line to the next.
        writer: gets the same numbers under ``ringprune/``, for example a TensorBoard ``SummaryWriter``.

    Raises:
        ArgumentTypeError: the optimizer has no ``stats()``.
        ConfigurationError: the file cannot be written, or ``every`` is no whole number above 0.
    """

    def __init__(self, path: str | Path, optimizer: HasStats, *, every: int = 50, writer: Writer | None = None) -> None:
        if not callable(getattr(optimizer, "stats", None)):
            raise ArgumentTypeError(f"optimizer is a {type(optimizer).__name__}: something with stats() is wanted")
        self._optimizer, self._writer = optimizer, writer
        self._every = whole_number("every", every, 1)
        self._calls, self._written = 0, -1
        self._last: dict[str, float | Tensor] = {}
        try:
            self._file = Path(path).open("w")  # noqa: SIM115 - until close()
        except OSError as error:
            raise ConfigurationError(f"path={str(path)!r}: {error.strerror}") from error
        self._started = time.monotonic()
        self._write()

    def step(self, **values: float | Tensor) -> None:
        """A step was made; every ``every`` calls, and at :meth:`close`, a line is written.

        Args:
            **values: numbers of the step to keep with the line, such as ``loss=loss``; read where a line is written.
        """
        self._calls += 1
        self._last = {name: v.detach() if isinstance(v, Tensor) else v for name, v in values.items()}
        if self._calls % self._every == 0:
            self._write()

    def close(self) -> None:
        """Write the last line, and close the file."""
        if not self._file.closed:
            if self._calls != self._written:
                self._write()
            self._file.close()

    def __enter__(self) -> "StatsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self) -> None:
        numbers = scalars(self._optimizer.stats())
        values = {name: float(value) for name, value in self._last.items()}  # waits for a GPU only here
        head = {"calls": self._calls, "elapsed_seconds": time.monotonic() - self._started}
        self._file.write(json.dumps({**head, "values": values, "stats": numbers}) + "\n")
        self._file.flush()  # a run that is killed has what it had
        self._written = self._calls
        if self._writer is not None:
            for name, number in (numbers | values).items():
                self._writer.add_scalar(f"ringprune/{name}", number, self._calls)
