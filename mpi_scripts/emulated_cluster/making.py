"""Makes the hosts and links of a cluster, wholly or not at all, and ends them."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from . import hosts, state
from .errors import ClusterArgumentError, ClusterError
from .processes import boot, end
from .state import State
from .tools import in_network, ip, run

__all__ = [
    "INTERFACE",
    "NETWORK",
    "all_or_nothing",
    "checked",
    "end_all",
    "join",
    "make_room",
    "start_hosts",
    "term_raises",
]

INTERFACE = "eth0"
PREFIX = "10.77.0"
NETWORK = f"{PREFIX}.0/24"
MOST_HOSTS = 200
CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def checked(size: int, queue_ms: float, mtu: int, ttl: float, congestion: str | None) -> str | None:
    """Refuse numbers that cannot work; the name of the congestion control to use, None for the machine's own choice.

    Raises:
        ClusterArgumentError: one of them cannot work.
    """
    allowed = (
        ("hosts", size, 1, MOST_HOSTS),
        ("queue-ms", queue_ms, 0.1, 10_000),
        ("mtu", mtu, 576, 65_535),
        ("ttl", ttl, 1, 30 * 86_400),
    )
    for name, value, low, high in allowed:
        if not low <= value <= high:
            raise ClusterArgumentError(f"{name} is {value:g}: allowed are {low:g} to {high:g}")
    available = CONGESTION.read_text().split() if CONGESTION.exists() else []
    if congestion is not None and congestion not in available:
        raise ClusterArgumentError(f"congestion control {congestion!r}: this kernel has {', '.join(available)}")
    return congestion or ("cubic" if "cubic" in available else None)


def make_room(folder: Path) -> None:
    """Forget a cluster that is gone.

    Raises:
        ClusterError: there is one that is not.
    """
    found = state.load(folder)
    if found is None:
        return
    if len(found.gone) < len(found.everyone):
        partly = f"partly ({', '.join(found.gone)} gone) " if found.gone else ""
        raise ClusterError(f"a cluster is {partly}up in {folder} already: `cluster down` ends it")
    state.erase(folder)


@contextlib.contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """Take the cluster down again when the block raises, or when an interrupt or a SIGTERM came meanwhile.

    Both are looked at when the block has ended: a host that is being started is always either written down or gone.
    """
    arrived: list[int] = []
    done = False
    with _signals_go_to(arrived):
        try:
            yield
            done = not arrived
        finally:
            if not done:
                end_all(folder)
            if arrived:
                raise KeyboardInterrupt if signal.SIGINT in arrived else SystemExit(128 + arrived[0])


@contextlib.contextmanager
def term_raises() -> Iterator[None]:
    """A SIGTERM ends the block by SystemExit, so that all in it is taken down; where the caller handles it, as he does.

    By itself it would end the process at once, and a job that this has started would go on.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not end what the first has begun to take down
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_go_to(arrived: list[int]) -> Iterator[None]:
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, lambda n, frame: arrived.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_hosts(folder: Path, size: int, queue_ms: float, ttl: float, lifeline: int | None) -> State:
    """Start the switch and the hosts, each written down before the next is started."""
    names = [f"h{i}" for i in range(size)]
    addresses = [f"{PREFIX}.{11 + i}" for i in range(size)]
    hosts_file = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(addresses, names, strict=True))]
    hosts_file.write_text("\n".join(lines) + "\n")
    until = None if lifeline is not None else time.time() + ttl
    made = State(hosts.start("sw", "", hosts_file, ttl, lifeline), queue_ms=queue_ms, until=until)
    state.save(folder, made)
    for name, address in zip(names, addresses, strict=True):
        made.hosts.append(hosts.start(name, address, hosts_file, ttl, lifeline))
        state.save(folder, made)
    return made


def join(made: State, mtu: int, congestion: str | None) -> None:
    """Connect every host to the bridge in the switch."""
    switch = made.switch.pid
    ip(switch, "link", "add", "br0", "type", "bridge")
    ip(switch, "link", "set", "br0", "up")
    for host in made.hosts:
        peer = ["peer", "name", INTERFACE, "mtu", str(mtu), "netns", str(host.pid)]
        ip(switch, "link", "add", host.name, "mtu", str(mtu), "type", "veth", *peer)
        ip(switch, "link", "set", host.name, "master", "br0", "up")
        ip(host.pid, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        ip(host.pid, "link", "set", INTERFACE, "up")
        if congestion:
            # A namespace may be forbidden to choose it for all sockets (EPERM), but a route may name it.
            route = ["dev", INTERFACE, "src", host.address, "congctl", congestion]
            run(*in_network(host.pid, "ip", "route", "replace", NETWORK, *route))


def end_all(folder: Path) -> None:
    """End what runs on the cluster of this folder, then its hosts, and forget it; nothing where nothing is up."""
    found = state.load(folder)
    if found is not None and found.boot == boot():
        end([process for _, process in hosts.inside(found.everyone)])
        end([host.process for host in found.everyone])
    state.erase(folder)
