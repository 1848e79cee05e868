"""The emulated cluster: hosts in network namespaces of one Linux machine, joined by rate-limited links.

::

    h0 eth0 ---- h0 |          each ---- is a veth pair; at both ends a token bucket:
    h1 eth0 ---- h1 | sw       host -> switch limits the upload, switch -> host the download
    h2 eth0 ---- h2 | bridge   h0 is 10.77.0.11, h1 is 10.77.0.12, ...
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from . import hosts, making, rates, state
from .counters import Counters, read_counters
from .errors import CannotHere, ClusterArgumentError, ClusterError
from .hosts import Host
from .making import INTERFACE
from .prerequisites import why_not_here
from .processes import Process
from .state import State
from .tools import ip

__all__ = ["Cluster", "Direction", "take_down"]

Direction = Literal["up", "down", "both"]


class Cluster:
    """A cluster that is up, or was; ``with`` takes it down at the end, with all that runs on it.

    Args:
        folder: where its state lies; None is the default folder.

    Raises:
        ClusterError: no cluster is up there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or state.default_folder()).absolute()
        self._lifeline: int | None = None
        self._state = self._loaded()

    # -- up and down ---------------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        size: int,
        rate: str = "1gbit",
        *,
        folder: Path | None = None,
        queue_ms: float = 20.0,
        mtu: int = 1500,
        congestion: str | None = None,
        ttl: float = 3600.0,
        tied: bool = False,
    ) -> "Cluster":
        """Make ``size`` hosts and their links.

        Args:
            size: number of hosts, 1 to 200.
            rate: of every link in both directions: ``"100mbit"``, ``"2.5gbit"``, ``"unlimited"``.
            folder: where the state is kept; clusters in different folders do not touch each other.
            queue_ms: milliseconds of traffic a link holds back before it drops frames.
            mtu: bytes of an IP packet at most.
            congestion: TCP's congestion control on all hosts; None is cubic where the kernel has it.
            ttl: seconds after which the hosts end by themselves.
            tied: let the hosts end when this process does, even if it is killed, instead of after ``ttl``.

        Raises:
            CannotHere: no root, or a tool or a part of the kernel is missing.
            ClusterArgumentError: an argument cannot work.
            ClusterError: a cluster is up there already, or a command failed. Nothing is left behind.
        """
        bits = rates.bits_per_second(rate)
        congestion = making.checked(size, queue_ms, mtu, ttl, congestion)
        if reason := why_not_here():
            raise CannotHere(reason)
        place = (folder or state.default_folder()).absolute()
        with state.locked(place), _lifeline(tied) as (theirs, ours):
            making.make_room(place)
            with making.all_or_nothing(place):
                made = making.start_hosts(place, size, queue_ms, ttl, theirs)
                making.join(made, mtu, congestion)
                cluster = cls(place)
                cluster._set_rates(bits, cluster.hosts, "both")
        cluster._lifeline = ours
        return cluster

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, size: int, rate: str = "1gbit", **options: Any) -> Iterator["Cluster"]:
        """A cluster for the length of a ``with`` block, in a folder of its own; it ends when this process does.

        A SIGTERM raises SystemExit in the block: what runs on the cluster is ended first.

        The arguments are those of :meth:`up`, without ``folder``, ``ttl`` and ``tied``.
        """
        with (
            making.term_raises(),
            tempfile.TemporaryDirectory(prefix="ringprune-cluster-") as name,
            cls.up(size, rate, folder=Path(name), tied=True, **options) as cluster,
        ):
            yield cluster

    def down(self, *, kill: bool = False) -> None:
        """End all hosts. A cluster that is down already stays down.

        Args:
            kill: end what still runs on them first.

        Raises:
            ClusterError: processes run on the hosts and ``kill`` is not given; they are named.
        """
        take_down(self.folder, kill=kill)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down(kill=True)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[Host]:
        """The hosts in their order."""
        return self._state.hosts

    @property
    def until(self) -> float | None:
        """When the hosts end by themselves, in seconds since 1970; None: with the process that made them."""
        return self._state.until

    def host(self, name: str) -> Host:
        """The host of this name; ``"sw"`` is the switch.

        Raises:
            ClusterArgumentError: there is none.
        """
        for host in self._state.everyone:
            if host.name == name:
                return host
        raise ClusterArgumentError(f"no host {name!r}: there are {', '.join(h.name for h in self._state.everyone)}")

    def processes(self) -> list[tuple[Host, Process]]:
        """What runs on the hosts and the switch."""
        return hosts.inside(self._state.everyone)

    # -- links ---------------------------------------------------------------------------------------------------------

    def rate(self, rate: str, *, host: str | None = None, direction: Direction = "both") -> None:
        """Change the rate of links; what is under way goes on at the new rate.

        Args:
            rate: as in :meth:`up`.
            host: only of this host's link; None is all.
            direction: ``"up"`` from the host, ``"down"`` to it, or both.
        """
        bits = rates.bits_per_second(rate)
        chosen = self.hosts if host is None else [self._real(host)]
        with state.locked(self.folder):
            self._state = self._loaded()
            self._set_rates(bits, chosen, direction)

    def configured_rates(self) -> dict[str, tuple[float | None, float | None]]:
        """Upload and download of each host in bit/s, as the kernel has them now; None is unlimited."""
        switch = self._state.switch.pid
        return {
            host.name: (rates.configured_rate(host.pid, INTERFACE), rates.configured_rate(switch, host.name))
            for host in self.hosts
        }

    def plug(self, host: str, *, connected: bool) -> None:
        """Pull a host's cable out of the switch, or put it back in."""
        ip(self._state.switch.pid, "link", "set", self._real(host).name, "up" if connected else "down")

    def counters(self) -> dict[str, Counters]:
        """Bytes and frames on each host's link since the cluster came up."""
        switch = self._state.switch.pid
        return {host.name: read_counters(host.pid, switch, host.name) for host in self.hosts}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _real(self, name: str) -> Host:
        host = self.host(name)
        if host == self._state.switch:
            raise ClusterArgumentError(f"{name!r} is the switch: name a host, {', '.join(h.name for h in self.hosts)}")
        return host

    def _loaded(self) -> State:
        found = state.load(self.folder)
        if found is None:
            raise ClusterError(f"no cluster is up in {self.folder}: `cluster up 4 1gbit` makes one")
        if gone := found.gone:
            raise ClusterError(
                f"the cluster in {self.folder} is gone ({', '.join(gone)}): its time was over, or the machine was "
                "started again; `cluster down` clears it away"
            )
        return found

    def _set_rates(self, bits: float | None, chosen: list[Host], direction: Direction) -> None:
        current = self._state
        for host in chosen:
            up, down = current.rates.get(host.name, (None, None))
            if direction in ("up", "both"):
                rates.set_rate(host.pid, INTERFACE, bits, current.queue_ms)
                up = bits
            if direction in ("down", "both"):
                rates.set_rate(current.switch.pid, host.name, bits, current.queue_ms)
                down = bits
            current.rates[host.name] = (up, down)
        state.save(self.folder, current)


def take_down(folder: Path, *, kill: bool = False) -> bool:
    """End the cluster of this folder; whether there was one, be it only what a gone one has left written.

    Args:
        folder: where its state lies.
        kill: end what still runs on its hosts first.

    Raises:
        ClusterError: processes run on the hosts and ``kill`` is not given; they are named.
    """
    if not folder.exists():
        return False
    with state.locked(folder):
        found = state.load(folder)
        if found is None:
            return False
        left = [] if kill else hosts.inside(found.everyone)
        if left:
            named = ", ".join(f"{host.name}: {process.pid} ({process.command})" for host, process in left)
            raise ClusterError(f"not taken down, processes run on it (`cluster down --kill` ends them): {named}")
        making.end_all(folder)
    return True


@contextlib.contextmanager
def _lifeline(tied: bool) -> Iterator[tuple[int | None, int | None]]:
    """The end of a pipe that hosts read from, and ours; theirs is closed after the block, ours if it raises."""
    if not tied:
        yield None, None
        return
    theirs, ours = os.pipe()
    try:
        yield theirs, ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
