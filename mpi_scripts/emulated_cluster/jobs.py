"""Jobs on the emulated cluster: one command on several hosts, by mpirun or with torch.distributed's variables."""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cluster import Cluster
from .errors import CannotHere, ClusterArgumentError
from .hosts import Host, enter, inside
from .making import INTERFACE, NETWORK
from .output import Output, Pump
from .processes import Process, end
from .state import FOLDER_VARIABLE

__all__ = ["TIMED_OUT", "Job", "entered", "launch", "mpirun"]

TIMED_OUT = 124
POLL_SECONDS = 0.02
GRACE_SECONDS = 2.0  # for the others, after one has failed: their own messages are worth having
ROUNDS = 5  # a process may start another while it is looked for
MARK = "RINGPRUNE_CLUSTER_JOB"  # in the environment of all that a job starts, wherever it goes

STAND_INS = Path(__file__).resolve().parent / "bin"  # the ssh that mpirun and horovodrun find
INTERFACES = {"GLOO_SOCKET_IFNAME": INTERFACE, "HOROVOD_GLOO_IFACE": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
# Variables and not flags, so that a flag given on the command line wins: mpirun refuses one that is given twice.
OPEN_MPI = {
    "plm": "rsh",
    "plm_rsh_agent": "ssh",
    "oob_tcp_if_include": NETWORK,
    "btl_tcp_if_include": NETWORK,
    "pml": "ob1",
    "mpi_yield_when_idle": "1",
    "rmaps_base_oversubscribe": "1",
}


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Attributes:
        returncode: 0, or the status of the first process that failed (128 + n for signal n); 124 at the time limit.
        output: what it wrote, where that was captured, each line of :func:`launch` with its rank.
        seconds: how long it ran.
    """

    returncode: int
    output: str
    seconds: float


@dataclass(frozen=True)
class Task:
    """One process of a job.

    Attributes:
        host: where it runs.
        command: program and arguments.
        variables: added to the environment.
        tag: what stands before each line it writes.
    """

    host: Host
    command: list[str]
    variables: dict[str, str]
    tag: str


def mpirun(
    cluster: Cluster,
    ranks: int,
    command: Sequence[str],
    *,
    flags: Sequence[str] = (),
    ranks_per_host: int = 1,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    output: Output = "inherit",
) -> Job:
    """Run a command under Open MPI's ``mpirun`` on the first hosts, started from host h0.

    All variables of the caller's environment reach all ranks. Interfaces are set for Open MPI, Horovod, Gloo and NCCL.

    Args:
        cluster: one that is up.
        ranks: number of ranks.
        command: program and arguments.
        flags: more of mpirun's, for example ``["--mca", "coll_tuned_use_dynamic_rules", "1"]``.
        ranks_per_host: ranks on each host; hosts are filled in their order.
        timeout: seconds after which all of it is killed.
        environment: variables added to the inherited ones.
        output: ``"inherit"`` leaves it to mpirun and the terminal, ``"capture"`` returns it.

    Raises:
        ClusterArgumentError: there are not so many hosts, or no command.
        CannotHere: there is no Open MPI on PATH.
    """
    hosts = _filled(cluster, ranks, ranks_per_host, command)
    _check_open_mpi()
    names = ",".join(f"{host.name}:{ranks_per_host}" for host in hosts)
    line = ["mpirun", "--allow-run-as-root", "-np", str(ranks), "--host", names]
    line += ["--map-by", "slot", "--bind-to", "none", *flags]
    btl = {"btl": "tcp,self" if ranks_per_host == 1 else "tcp,self,vader"}
    defaults = {f"OMPI_MCA_{name}": value for name, value in (OPEN_MPI | btl).items()}
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    task = Task(hosts[0], [*line, *command], variables, tag="")
    return _run(cluster, [task], timeout, environment, output)


def launch(
    cluster: Cluster,
    ranks: int,
    command: Sequence[str],
    *,
    ranks_per_host: int = 1,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    output: Output = "tagged",
) -> Job:
    """Run a command on the first hosts with the variables that ``torch.distributed`` starts from; no MPI takes part.

    Set are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (host h0) and MASTER_PORT, and the interface for
    Gloo. When a process fails the others get two seconds, then all are killed.

    Args:
        cluster: one that is up.
        ranks: number of processes.
        command: program and arguments.
        ranks_per_host: processes on each host; hosts are filled in their order.
        timeout: seconds after which all of it is killed.
        environment: variables added to the inherited ones.
        output: ``"tagged"`` prints each line behind its rank, ``"capture"`` returns these lines, ``"inherit"`` leaves
            the processes the caller's standard output.

    Raises:
        ClusterArgumentError: there are not so many hosts, or no command.
    """
    hosts = _filled(cluster, ranks, ranks_per_host, command)
    tasks = []
    for rank in range(ranks):
        host, local_rank = divmod(rank, ranks_per_host)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(min(ranks_per_host, ranks - host * ranks_per_host)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        tasks.append(Task(hosts[host], list(command), variables, tag=f"[{rank}] "))
    return _run(cluster, tasks, timeout, environment, output)


def entered(cluster: Cluster, host: str, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and whole environment of a command on one host, ``"sw"`` included.

    Raises:
        ClusterArgumentError: there is no such host, or no command.
    """
    if not command:
        raise ClusterArgumentError("no command given")
    return enter(cluster.host(host), command), _environment(cluster)


def _run(
    cluster: Cluster, tasks: Sequence[Task], timeout: float | None, added: Mapping[str, str] | None, output: Output
) -> Job:
    begin = time.monotonic()
    mark = f"{MARK}={uuid.uuid4().hex}"
    pump = Pump(keep=output == "capture")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for task in tasks:
            variables = _environment(cluster) | task.variables | dict(added or {}) | dict([mark.split("=")])
            processes.append(_started(task, variables, output, pump))
        returncode = _wait(processes, None if timeout is None else begin + timeout)
    finally:
        _end(cluster, mark, processes)
    return Job(returncode, pump.finish(), time.monotonic() - begin)


def _started(task: Task, variables: dict[str, str], output: Output, pump: Pump) -> "subprocess.Popen[bytes]":
    command = enter(task.host, task.command)
    if output == "inherit":
        return subprocess.Popen(command, env=variables)
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    pump.follow(process.stdout, task.tag)
    return process


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", limit: float | None) -> int:
    """The first status that is not 0, else 0, once all have ended or enough time has passed."""
    failed = 0
    while True:
        statuses = [process.poll() for process in processes]
        if not failed and (failed := next(filter(None, statuses), 0)):
            grace = time.monotonic() + GRACE_SECONDS
            limit = grace if limit is None else min(limit, grace)
        if None not in statuses:
            return _status(failed)
        if limit is not None and time.monotonic() > limit:
            return _status(failed) if failed else TIMED_OUT
        time.sleep(POLL_SECONDS)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _end(cluster: Cluster, mark: str, processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """End our own children, which may not have entered a host yet, and whatever carries the mark on any host.

    mpirun's daemons and ranks are no children of ours.
    """
    left = [process for each in processes if (process := Process.of(each.pid))]
    for _ in range(ROUNDS):
        left += [process for _, process in inside(cluster.hosts) if process.has_variable(mark)]
        if not left:
            break
        end(left)
        left = []
    for each in processes:
        each.wait()


def _environment(cluster: Cluster) -> dict[str, str]:
    path = f"{STAND_INS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return INTERFACES | os.environ | {"PATH": path, FOLDER_VARIABLE: str(cluster.folder)}


def _filled(cluster: Cluster, ranks: int, ranks_per_host: int, command: Sequence[str]) -> list[Host]:
    if not command:
        raise ClusterArgumentError("no command given")
    if ranks < 1 or ranks_per_host < 1:
        raise ClusterArgumentError(f"{ranks} ranks, {ranks_per_host} on each host: at least 1 is needed of both")
    needed = -(-ranks // ranks_per_host)
    if needed > len(cluster.hosts):
        raise ClusterArgumentError(
            f"{ranks} ranks, {ranks_per_host} on each host, need {needed} hosts: {len(cluster.hosts)} are up"
        )
    return cluster.hosts[:needed]


def _check_open_mpi() -> None:
    found = shutil.which("mpirun")
    if found is None:
        raise CannotHere("no mpirun on PATH; that of the checkout: mpi_scripts/environment/run mpi_scripts/cluster ...")
    said = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    if "Open MPI" not in said:
        what = (said.splitlines() or ["silent"])[0]
        raise CannotHere(f"{found} is not Open MPI's ({what}): start it by hand with `cluster exec h0`")
