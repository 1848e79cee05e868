"""What is kept on disk of a cluster that is up: its hosts, its rates, and since which start of the machine."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from .errors import ClusterError
from .hosts import Host
from .processes import Process, boot

__all__ = ["FOLDER_VARIABLE", "State", "default_folder", "erase", "load", "locked", "save"]

FOLDER_VARIABLE = "RINGPRUNE_CLUSTER"
VERSION = 1


@dataclass
class State:
    """A cluster.

    Attributes:
        switch: holder of the bridge.
        hosts: in their order.
        rates: per host, upload and download in bit/s; None is unlimited.
        queue_ms: see :func:`emulated_cluster.rates.set_rate`.
        until: seconds since 1970 at which the holders end; None while they live as long as the process that made them.
        boot: the start of the machine this belongs to.
    """

    switch: Host
    hosts: list[Host] = field(default_factory=list)
    rates: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    queue_ms: float = 20.0
    until: float | None = None
    boot: str = field(default_factory=boot)

    @property
    def everyone(self) -> list[Host]:
        """The hosts and the switch."""
        return [*self.hosts, self.switch]

    @property
    def gone(self) -> list[str]:
        """Names of hosts whose holders are not there any more."""
        if self.boot != boot():
            return [host.name for host in self.everyone]
        return [host.name for host in self.everyone if not host.up]


def default_folder() -> Path:
    """Where the state lies: what RINGPRUNE_CLUSTER names, else build/cluster of the checkout."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named).absolute() if named else Path(__file__).resolve().parents[2] / "build" / "cluster"


def load(folder: Path) -> State | None:
    """The state in a folder; None where there is none.

    Raises:
        ClusterError: it cannot be read.
    """
    file = folder / "state.json"
    try:
        data = json.loads(file.read_text())
        if data.pop("version") != VERSION:
            raise ValueError("another version wrote it")
        hosts, rates = [_host(each) for each in data.pop("hosts")], data.pop("rates")
        pairs = {name: (up, down) for name, (up, down) in rates.items()}
        return State(switch=_host(data.pop("switch")), hosts=hosts, rates=pairs, **data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ClusterError(f"{file} cannot be read ({error.strerror})") from error
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{file} is not the state of a cluster ({error}): delete it") from error


def save(folder: Path, state: State) -> None:
    """Write the state, whole or not at all."""
    new = folder / "state.json.new"
    new.write_text(json.dumps({"version": VERSION, **asdict(state)}, indent=1) + "\n")
    new.replace(folder / "state.json")


def erase(folder: Path) -> None:
    """Delete what a cluster has written into its folder."""
    for name in ("state.json", "state.json.new", "hosts"):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, patience: float = 30.0) -> Iterator[None]:
    """Keep others from changing the cluster in ``folder`` meanwhile.

    Raises:
        ClusterError: somebody else is at it for more than ``patience`` seconds, or nothing can be written there.
    """
    limit = time.monotonic() + patience
    with _lock_file(folder) as file:
        while not _lock(file):
            if time.monotonic() > limit:
                raise ClusterError(f"another command has been changing the cluster in {folder} for {patience:g} s")
            time.sleep(0.05)
        yield


def _lock_file(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("w")
    except OSError as error:
        raise ClusterError(
            f"{folder} takes no files ({error.strerror}): name another folder in {FOLDER_VARIABLE}"
        ) from error


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _host(data: dict[str, Any]) -> Host:
    return Host(data["name"], Process(**data["process"]), data["address"])
