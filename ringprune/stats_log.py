"""A run's statistics at intervals: a file of JSON lines, written and read; and numbers for any other logger."""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from ringprune.errors import ArgumentTypeError, ConfigurationError, UsageError
from ringprune.validation import flag, whole_number

__all__ = ["Line", "StatsLog", "read", "scalars"]

Line = dict[str, Any]

NUMBERS, TABLES = ("calls", "elapsed_seconds"), ("values", "stats")  # tables are of numbers
OURS = f"ringprune.StatsLog, which writes in each line a JSON object of {', '.join((*NUMBERS, *TABLES))}"


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
        append: go on with the file of a run that is resumed: ``calls`` and ``elapsed_seconds`` count on from its last
            line, ``stats`` as the optimizer counts; ``ringprune report`` adds up the parts of several. A file that is
            not there, or empty, is begun.

    Raises:
        ArgumentTypeError: the optimizer has no ``stats()``, the writer no ``add_scalar()``, or ``append`` is no bool.
        ConfigurationError: the file cannot be written, with ``append`` it is none of these, or ``every`` is no whole
            number above 0.
    """

    def __init__(
        self,
        path: str | Path,
        optimizer: HasStats,
        *,
        every: int = 50,
        writer: Writer | None = None,
        append: bool = False,
    ) -> None:
        if not callable(getattr(optimizer, "stats", None)):
            raise ArgumentTypeError(f"optimizer is a {type(optimizer).__name__}: something with stats() is wanted")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise ArgumentTypeError(
                f"writer is a {type(writer).__name__}: something with add_scalar() is wanted, such as a SummaryWriter"
            )
        self._optimizer, self._writer = optimizer, writer
        self._every = whole_number("every", every, 1)
        goes_on, self._path = flag("append", append), str(path)
        try:
            before = _before(Path(path)) if goes_on else None
            self._file = Path(path).open("w" if before is None else "a")  # noqa: SIM115 - until close()
        except OSError as error:
            raise ConfigurationError(f"path={self._path!r}: {error.strerror}") from error
        self._calls = 0 if before is None else before["calls"]
        self._written: tuple[int, dict[str, float]] = (-1, {})
        self._last: dict[str, float | Tensor] = {}
        self._started = time.monotonic() - (0.0 if before is None else before["elapsed_seconds"])
        self._write()

    def step(self, **values: float | Tensor) -> None:
        """A step was made; every ``every`` calls, and at :meth:`close`, a line is written.

        Args:
            **values: numbers of the step to keep with the line, such as ``loss=loss``; read where a line is written,
                and None there where they are not finite.

        Raises:
            ArgumentTypeError: a value is no number, nor a tensor of one.
            ConfigurationError: the line cannot be written, as on a full disk; the log is closed.
            UsageError: it is closed.
        """
        if self._file.closed:
            raise UsageError(f"step() of a log that is closed, {self._path!r}: make another one, with append=True")
        self._last = {name: _number(name, value) for name, value in values.items()}
        self._calls += 1
        if self._calls % self._every == 0:
            self._write()

    def close(self) -> None:
        """Write the last line, and close the file."""
        if not self._file.closed:
            with self._file:
                if self._written != (self._calls, self._numbers()):  # a flush sends without a step
                    self._write()

    def __enter__(self) -> "StatsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _numbers(self) -> dict[str, float]:
        return {name: number for name, number in scalars(self._optimizer.stats()).items() if math.isfinite(number)}

    def _write(self) -> None:
        numbers = self._numbers()
        values = {name: float(value) for name, value in self._last.items()}  # waits for a GPU only here
        head = {"calls": self._calls, "elapsed_seconds": time.monotonic() - self._started}
        kept = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        try:
            self._file.write(json.dumps({**head, "values": kept, "stats": numbers}) + "\n")
            self._file.flush()  # a run that is killed has what it had
        except OSError as error:
            with suppress(OSError):  # it would be tried again
                self._file.close()
            raise ConfigurationError(
                f"path={self._path!r}: {error.strerror}; the line of call {self._calls:,} is not written, and no more "
                "will be. Make room, or log elsewhere; a resumed run goes on with the file by append=True"
            ) from error
        self._written = self._calls, numbers
        if self._writer is not None:
            for name, number in (numbers | values).items():
                self._writer.add_scalar(f"ringprune/{name}", number, self._calls)


def _number(name: str, value: Any) -> "float | Tensor":
    """A number, or a tensor of one, which is not read yet."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    try:
        if not isinstance(value, Tensor | str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    found = f"a tensor of {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
    raise ArgumentTypeError(f"{name} is {found}: a number, or a tensor of one, is wanted")


def read(path: Path) -> list[Line]:
    """The lines of a file; a last one that was cut off, as a killed run leaves it, is left out.

    Raises:
        ConfigurationError: it cannot be read, or is no such file; names the line.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: no text, so no log of {OURS}") from error
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(texts) and lines:
                break
            raise ConfigurationError(f"{path}, line {number}: not JSON ({error}), so no log of {OURS}") from error
        if not _is_line(line):
            raise ConfigurationError(f"{path}, line {number}: not a line of {OURS}")
        if lines and line["calls"] < lines[-1]["calls"]:
            raise ConfigurationError(
                f"{path}, line {number}: call {line['calls']:,} after call {lines[-1]['calls']:,}, so that it holds "
                "several runs; give each a file of its own"
            )
        lines.append(line)
    if not lines:
        raise ConfigurationError(f"{path}: no line of ringprune.StatsLog in it; it writes the first when it is made")
    return lines


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not all(isinstance(line.get(key), dict) for key in TABLES):
        return False
    noted = [value for value in line["values"].values() if value is not None]
    return all(map(_is_number, [*(line.get(key) for key in NUMBERS), *line["stats"].values(), *noted]))


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max  # JSON's whole numbers have no end
    return isinstance(value, float)


def _before(path: Path) -> Line | None:
    """The last line of a file to go on with; what was cut off after it is removed. None where there is nothing."""
    data = path.read_bytes() if path.exists() else b""
    whole, _, cut = data.rpartition(b"\n")
    if not whole.strip() and (not cut.strip() or (cut.startswith(b'{"calls"') and not _is_json(cut))):
        return None
    lines = read(path)  # before anything is changed: it is ours
    with path.open("rb+") as file:
        if cut and _is_json(cut):
            file.seek(0, SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(len(data) - len(cut))
    return lines[-1]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
