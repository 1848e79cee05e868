"""The command line of the emulated cluster."""

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from . import jobs
from .cluster import Cluster, take_down
from .counters import Counters
from .errors import ClusterArgumentError, ClusterError
from .rates import written
from .state import FOLDER_VARIABLE, default_folder

__all__ = ["main"]

DESCRIPTION = """\
A small cluster on one Linux machine: hosts in network namespaces, joined by rate-limited links. A job on it is really
bound by the network, and the kernel counts what goes over each link. Needs root. Nothing of the machine's own network
is changed.
"""
EPILOG = f"""\
A session:
  cluster up 4 1gbit                                    four hosts, h0 to h3, 1 Gbit/s each way
  cluster mpirun 4 -- python train.py                   one rank on each
  cluster mpirun --ppn 2 8 --mca mpi_show_mca_params 1 -- python train.py
                                                        what stands before -- goes to mpirun
  cluster launch --timeout 60 4 python train.py         the same command with torch.distributed's variables, no MPI
  cluster exec h0 horovodrun -np 4 -H h0:1,h1:1,h2:1,h3:1 python train.py
  cluster rate 100mbit; cluster rate 50mbit --host h2 --direction up
  cluster counters                                      bytes on each link
  cluster down

In a checkout that `make demo` has set up, write `mpi_scripts/environment/run mpi_scripts/cluster ...`, so that its
mpirun and Python are found. {FOLDER_VARIABLE} names the folder of the cluster's state (default: build/cluster of the
checkout); clusters in different folders do not touch each other.

Exit status: 0; 1 what was asked failed; 2 wrong arguments; 3 this machine cannot hold a cluster (no root, a tool or a
part of the kernel is missing); 124 time limit; of a job, that of the first process that failed.
docs/clusters.md says what such a network shows and what it does not.
"""
LONGEST_SECONDS = 1e9  # no call of the system takes much more
TITLES = {
    "tx_bytes": "tx bytes",
    "rx_bytes": "rx bytes",
    "tx_frames": "tx frames",
    "rx_frames": "rx frames",
    "up_wire_bytes": "up wire",
    "up_drops": "up drops",
    "down_wire_bytes": "down wire",
    "down_drops": "down drops",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse treats "--" differently from version to version.
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    options.separated = at < len(words)
    options.behind = words[at + 1 :]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # ranks may write letters that it has not
    status = 0
    try:
        status = int(options.run(options))
        print(end="", flush=True)
    except BrokenPipeError:  # who reads what is printed has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process, which flushes it
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return status


def _up(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    cluster = Cluster.up(
        options.hosts,
        options.rate,
        queue_ms=options.queue_ms,
        mtu=options.mtu,
        congestion=options.congestion,
        ttl=options.ttl,
    )
    names = ", ".join(host.name for host in cluster.hosts)
    print(
        f"{len(cluster.hosts)} hosts are up ({names}), {options.rate} each way, for {options.ttl / 60:g} minutes; "
        f"made in {time.monotonic() - begin:.1f} s"
    )
    return 0


def _rate(options: argparse.Namespace) -> int:
    cluster = Cluster()
    cluster.rate(options.rate, host=options.host, direction=options.direction)
    _show_rates(cluster)
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = Cluster()
    _show_rates(cluster)
    left = "as long as the process that made them" if cluster.until is None else f"{cluster.until - time.time():.0f} s"
    print(f"state: {cluster.folder}; the hosts stay {left} more" if cluster.until else f"the hosts stay {left}")
    for host, process in cluster.processes():
        print(f"running on {host.name}: {process.pid} ({process.command})")
    return 0


def _show_rates(cluster: Cluster) -> None:
    for host, (up, down) in zip(cluster.hosts, cluster.configured_rates().values(), strict=True):
        print(f"{host.name:5}{host.address:13} up {written(up):>10}   down {written(down):>10}")


def _exec(options: argparse.Namespace) -> int:
    command, environment = jobs.entered(Cluster(), options.host, _words(options))
    os.execvpe(command[0], command, environment)


def _mpirun(options: argparse.Namespace) -> int:
    flags, command = (options.words, options.behind) if options.separated else ([], options.words)
    if command and command[0].startswith("-"):
        raise ClusterArgumentError(f"{command[0]}: write -- between mpirun's flags and the command")
    job = jobs.mpirun(
        Cluster(), options.ranks, command, flags=flags, ranks_per_host=options.ppn, timeout=options.timeout
    )
    return _ended(job, options.timeout)


def _launch(options: argparse.Namespace) -> int:
    job = jobs.launch(Cluster(), options.ranks, _words(options), ranks_per_host=options.ppn, timeout=options.timeout)
    return _ended(job, options.timeout)


def _ended(job: jobs.Job, timeout: float | None) -> int:
    if job.returncode == jobs.TIMED_OUT and timeout is not None and job.seconds >= timeout:
        print(f"cluster: killed at its time limit of {timeout:g} s", file=sys.stderr)
    return job.returncode


def _counters(options: argparse.Namespace) -> int:
    found = Cluster().counters()
    if options.json:
        print(json.dumps({host: asdict(counters) for host, counters in found.items()}))
        return 0
    names = [field.name for field in fields(Counters)]
    print("host " + " ".join(f"{TITLES[name]:>13}" for name in names))
    for host, counters in found.items():
        values = ["-" if (value := getattr(counters, name)) is None else value for name in names]
        print(f"{host:5}" + " ".join(f"{value:>13}" for value in values))
    return 0


def _plug(options: argparse.Namespace) -> int:
    cluster = Cluster()
    if options.command == "plug":
        cluster.plug(options.host, connected=True)
        return 0
    cluster.plug(options.host, connected=False)
    if options.seconds is not None:
        try:
            time.sleep(options.seconds)
        finally:
            cluster.plug(options.host, connected=True)
    return 0


def _down(options: argparse.Namespace) -> int:
    folder = default_folder()
    print("down" if take_down(folder, kill=options.kill) else f"no cluster is up in {folder}")
    return 0


def _words(options: argparse.Namespace) -> list[str]:
    """The command of ``exec`` and ``launch``, with or without a -- before it, perhaps with one of its own."""
    inner = ["--"] if options.separated and options.words else []
    return [*options.words, *inner, *options.behind]


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < LONGEST_SECONDS:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: seconds, above 0 and below {LONGEST_SECONDS:g}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], says: str, more: str = "") -> Any:
        one = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}. {more}")
        one.set_defaults(run=run)
        return one

    one = add("up", _up, "make hosts and links")
    one.add_argument("hosts", type=int, metavar="N", help="number of hosts")
    one.add_argument("rate", metavar="RATE", help="of every link, each way: 100mbit, 2.5gbit, unlimited")
    one.add_argument("--queue-ms", type=float, default=20, help="milliseconds a link holds back before it drops (20)")
    one.add_argument("--mtu", type=int, default=1500, help="bytes of an IP packet (1500)")
    one.add_argument("--congestion", help="TCP's congestion control (cubic where there is one)")
    one.add_argument("--ttl", type=float, default=3600, help="seconds after which hosts end by themselves (3600)")
    one = add("rate", _rate, "change the rate of links, while jobs run")
    one.add_argument("rate", metavar="RATE")
    one.add_argument("--host", help="only this host's link")
    one.add_argument(
        "--direction", choices=["up", "down", "both"], default="both", help="from the host, to it, or both"
    )
    add("status", _status, "show hosts, the rates the kernel keeps, and what runs")
    one = add("exec", _exec, "run a command on one host", "The host sw is the switch.")
    one.add_argument("host", metavar="HOST")
    one.add_argument("words", metavar="CMD", nargs=argparse.REMAINDER)
    for name, run, says in (
        ("mpirun", _mpirun, "run a command under Open MPI's mpirun"),
        ("launch", _launch, "run a command with torch.distributed's variables, output tagged by rank"),
    ):
        one = add(name, run, says, "Hosts are filled in their order; options come before N.")
        one.add_argument("--ppn", type=int, default=1, metavar="K", help="ranks on each host (1)")
        one.add_argument("--timeout", type=_seconds, metavar="S", help="kill all of it after S seconds")
        one.add_argument("ranks", type=int, metavar="N", help="number of ranks")
        what = "[mpirun flags] -- CMD" if name == "mpirun" else "CMD"
        one.add_argument("words", metavar=what, nargs=argparse.REMAINDER)
    one = add("counters", _counters, "show bytes and frames on each host's link since it was made")
    one.add_argument("--json", action="store_true", help="for programs")
    one = add("unplug", _plug, "pull a host's cable out of the switch")
    one.add_argument("host", metavar="HOST")
    one.add_argument("--seconds", type=_seconds, metavar="S", help="and put it back after S seconds")
    one = add("plug", _plug, "put a host's cable back")
    one.add_argument("host", metavar="HOST")
    one = add("down", _down, "end the cluster")
    one.add_argument("--kill", action="store_true", help="end what runs on its hosts, too")
    return parser
