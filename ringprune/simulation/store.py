"""Where finished runs are kept: JSON lines that several processes may add to, keyed by what was run."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringprune.errors import ConfigurationError, RingPruneError
from ringprune.simulation.spec import renewed

__all__ = ["Key", "Store"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """What was run; two runs with the same key have the same outcome.

    Attributes:
        task: its name.
        version: of the task, and a digest of its data.
        policy: the specification, density included.
        ranks: how many.
        learning_rate: at its highest.
        seed: of weights, order and draws.
        steps: how many.
    """

    task: str
    version: str
    policy: str
    ranks: int
    learning_rate: float
    seed: int
    steps: int

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


_BEGUN = b'{"task": '


def _digest(record: Record) -> str:
    """Of a run's key as it would be today: an argument that its policy has got since was at its default."""
    fields = {name: record[name] for name in Key.__dataclass_fields__}
    return Key(**(fields | {"policy": renewed(record["policy"])})).digest


class Store:
    """A file of finished runs, one JSON object a line.

    A run is claimed while it is made, by a lock that ends with its process: two processes never make the same run, and
    one that is killed leaves it to the next. A line that was cut short by a kill is not read.

    Args:
        path: the file; made when the first run is added. Beside it lies a file of locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: int | None = None

    def records(self) -> dict[str, Record]:
        """All finished runs, by the digest of their key.

        Raises:
            ConfigurationError: there is no run in the file, and its first line is not begun like one's either, which
                was cut short then: to add some could spoil what it is.
        """
        if not self.path.exists():
            return {}
        found: dict[str, Record] = {}
        lines = self.path.read_bytes().split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
                digest = _digest(record)
            except (ValueError, TypeError, KeyError, RingPruneError):
                continue  # cut short, damaged, or no run
            found[digest] = record
        if not found and any(lines) and not lines[0].startswith(_BEGUN):
            raise ConfigurationError(f"--store {self.path} holds no finished run: name another file, or a new one")
        return found

    def add(self, key: Key, outcome: Record) -> None:
        """Append a finished run."""
        line = json.dumps(asdict(key) | outcome) + "\n"
        with self._locked(0):
            torn = self.path.exists() and self.path.stat().st_size > 0 and self.path.read_bytes()[-1:] != b"\n"
            with self.path.open("a") as file:
                file.write(("\n" if torn else "") + line)
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def claim(self, key: Key) -> Iterator[bool]:
        """Hold the right to make a run.

        Yields:
            Whether it is ours to make: False where it is finished, or another process is at it.
        """
        place, locks = 1 + int(key.digest[:12], 16), self._lock_file()
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            yield False
            return
        try:
            yield key.digest not in self.records()
        finally:
            fcntl.lockf(self._lock_file(), fcntl.LOCK_UN, 1, place)

    @contextmanager
    def _locked(self, place: int) -> Iterator[None]:
        fcntl.lockf(self._lock_file(), fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file(), fcntl.LOCK_UN, 1, place)

    def _lock_file(self) -> int:
        """The file of locks, opened once: closing any handle of it would end all of this process's locks."""
        if self._locks is None:
            try:
                self._locks = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise ConfigurationError(f"--store {self.path}: {self.path}.lock: {error.strerror}") from error
        return self._locks
