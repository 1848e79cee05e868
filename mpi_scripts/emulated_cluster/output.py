"""What the processes of a job write: shown or kept, line by line, each line behind its rank."""

import contextlib
import sys
import threading
from typing import IO, Literal

__all__ = ["Output", "Pump"]

Output = Literal["inherit", "tagged", "capture"]
SECONDS = 5.0


class Pump:
    """Reads what several processes write until all have closed their ends.

    Args:
        keep: keep the lines instead of showing them.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._lines: list[str] = []
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()

    def follow(self, stream: IO[bytes], tag: str) -> None:
        """Read from one process; ``tag`` stands before each of its lines."""
        thread = threading.Thread(target=self._read, args=(stream, tag), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> str:
        """Wait for the ends of all streams, 5 s at most, and return the lines kept."""
        for thread in self._threads:
            thread.join(SECONDS)
        with self._turn:
            return "".join(self._lines)

    def _read(self, stream: IO[bytes], tag: str) -> None:
        with stream, contextlib.suppress(BrokenPipeError):  # who reads what is printed has seen enough
            for data in stream:
                line = tag + data.decode(errors="replace").rstrip("\n") + "\n"
                with self._turn:
                    if self._keep:
                        self._lines.append(line)
                    else:
                        sys.stdout.write(line)
                        sys.stdout.flush()
