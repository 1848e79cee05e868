"""Finds out, before anything is made, whether this machine can hold an emulated cluster."""

import os
import shutil
import subprocess

__all__ = ["why_not_here"]

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
SECONDS = 30

# All that a cluster is made of, in namespaces that end with this script.
PROBE = """
echo "network, hostname, IPC and mount namespaces"
exec unshare --net --uts --ipc --mount -- /bin/sh -ec '
echo "a tmpfs and a sysfs of its own (is this a container without CAP_SYS_ADMIN?)"
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
echo "a bridge (kernel module bridge)"
ip link add probe-br type bridge
echo "a veth pair (kernel module veth)"
ip link add probe-a type veth peer name probe-b
echo "a token bucket filter (kernel module sch_tbf)"
tc qdisc add dev probe-a root tbf rate 1gbit burst 125000 limit 250000
echo "writing under /proc/sys"
echo probe > /proc/sys/kernel/hostname
echo
'
"""


def why_not_here() -> str | None:
    """One line that says what is missing for an emulated cluster; None where nothing is."""
    if os.geteuid() != 0:
        return "the emulated cluster needs root: it makes network namespaces (nothing of the machine's own is changed)"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        return f"the emulated cluster needs {', '.join(missing)} on PATH: install {packages}"
    try:
        done = subprocess.run(
            ["/bin/sh", "-ec", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the emulated cluster: making a network namespace took more than {SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line]
    return f"the emulated cluster needs {lines[-1]}: {' '.join(done.stderr.split())}"
