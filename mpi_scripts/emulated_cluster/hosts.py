"""A host of the emulated cluster: a process that holds network, hostname, IPC and mount namespaces of its own."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError
from .processes import Process, network_of, processes_inside

__all__ = ["Host", "enter", "inside", "start"]

SECONDS = 30

# $1 name, $2 hosts file, then what holds the namespaces. /dev/shm and /sys are the host's own, so that libraries which
# look there see one host: its shared memory, its interfaces. A file under /proc/sys is that of the caller's namespaces.
SCRIPT = """
echo $$
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount --bind "$2" /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
echo ready
shift 2
exec "$@" > /dev/null 2>&1
"""
# nsenter starts in the root folder of the mount namespace it enters.
IN_FOLDER = 'cd "$0" 2> /dev/null || echo "cluster: no folder $0 on this host, started in /" >&2; exec "$@"'


@dataclass(frozen=True)
class Host:
    """A host, or the switch.

    Attributes:
        name: ``h0``, ``h1`` and so on; ``sw`` is the switch.
        process: the one that holds the namespaces.
        address: IPv4 of its ``eth0``; empty for the switch.
    """

    name: str
    process: Process
    address: str = ""

    @property
    def pid(self) -> int:
        """Number of the process that holds the namespaces."""
        return self.process.pid

    @property
    def up(self) -> bool:
        """Whether it is still held."""
        return self.process.alive


def start(name: str, address: str, hosts_file: Path, ttl: float, lifeline: int | None) -> Host:
    """Start a host, without a link.

    Args:
        name: its hostname.
        address: the one it will have.
        hosts_file: what it sees as /etc/hosts.
        ttl: seconds after which its holder ends by itself.
        lifeline: reading end of a pipe; then the holder ends when the other end is closed, whatever the time.

    Raises:
        ClusterError: it did not start; nothing is left of it.
    """
    holding = ["sleep", f"{ttl:g}"] if lifeline is None else ["cat"]
    # setsid --fork: no child of ours, and no Ctrl-C of our terminal reaches it.
    command = ["setsid", "--fork", "unshare", "--net", "--uts", "--ipc", "--mount", "--"]
    command += ["/bin/sh", "-ec", SCRIPT, "sh", name, str(hosts_file), *holding]
    stdin = subprocess.DEVNULL if lifeline is None else lifeline
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=SECONDS)
    said = done.stdout.split()
    process = Process.of(int(said[0])) if said[1:] == ["ready"] else None
    if process is None:
        raise ClusterError(f"host {name} did not start: {' '.join(done.stderr.split()) or 'no reason given'}")
    return Host(name, process, address)


def enter(host: Host, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` on ``host``, in the caller's working directory.

    Raises:
        ClusterError: the host is gone.
    """
    if not host.up:
        raise ClusterError(f"host {host.name} is gone: its time was over, or somebody ended its holder")
    namespaces = ["nsenter", "--target", str(host.pid), "--net", "--uts", "--ipc", "--mount", "--"]
    return [*namespaces, "/bin/sh", "-c", IN_FOLDER, os.getcwd(), *command]


def inside(hosts: Sequence[Host]) -> list[tuple[Host, Process]]:
    """Processes on these hosts, their holders left out, in the order of their numbers."""
    networks = {network: host for host in hosts if host.up and (network := network_of(host.pid)) is not None}
    found = [(networks[network], process) for process, network in processes_inside(networks)]
    holders = {host.process for host in hosts}
    return sorted((pair for pair in found if pair[1] not in holders), key=lambda pair: pair[1].pid)
