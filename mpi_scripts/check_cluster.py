"""Checks a cluster before one trains on it: who the ranks are, how fast the links are, what selection costs.

mpirun -np 4 --host a,b,c,d python mpi_scripts/check_cluster.py --json check.json --plot check.png
"""

import argparse
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from mpi4py import MPI

from mpi_scripts.cluster_check import findings, links, ranks, report, selection
from ringprune.readers import above_zero, at_least, picture, share, target
from ringprune.whole_file import write_json

EPILOG = """\
Links are measured between hosts, from the first rank of each; where there is one host, between its ranks. Hosts of the
same kernel (containers, the emulated cluster) count as hosts, but share their machine's cores. Run it while nothing
else runs. Exit status: 0; with --strict 1 where it warns.
"""


def main() -> int:
    """Check on all ranks; rank 0 reports."""
    world = MPI.COMM_WORLD
    options = _options(world)
    found = _check(world, options)
    if world.rank == 0:
        if options.json != "-":
            print(report.show(found))
        write_json(found.record, options.json)
        if options.plot:
            from mpi_scripts.cluster_check.picture import draw

            draw(found, options.plot)
    return 1 if options.strict and found.warnings else 0


def _check(world: MPI.Intracomm, options: argparse.Namespace) -> report.Report:
    everyone = ranks.gather(world)
    hosts = ranks.hosts_of(everyone)
    between_hosts = len(hosts) > 1
    ends = ranks.leaders_of(everyone) if between_hosts else everyone
    is_end = any(end.rank == world.rank for end in ends)
    places = world.Split(0 if is_end else 1, world.rank)
    measured = links.measure_links(places, options.seconds, options.most_pairs) if is_end else None
    places.Free()
    links.wait_quietly(world)
    measured = world.bcast(measured, root=0)
    assert measured is not None
    names = hosts if between_hosts else [f"rank {each.rank}" for each in everyone]
    return report.Report(
        mpi=ranks.describe_mpi(),
        ranks=everyone,
        places=names,
        links=measured,
        entries=options.entries,
        density=options.density,
        selection=_selection(world, everyone, options),
        warnings=findings.find(everyone, names, measured),
    )


def _selection(world: MPI.Intracomm, everyone: list[ranks.Rank], options: argparse.Namespace) -> dict[str, float]:
    """One host after the other: they may share a machine."""
    mine: dict[str, float] = {}
    for leader in ranks.leaders_of(everyone):
        if world.rank == leader.rank:
            mine[leader.host] = selection.selection_seconds(options.entries, options.density)
        links.wait_quietly(world)
    return {host: seconds for part in world.allgather(mine) for host, seconds in part.items()}


def _options(world: MPI.Intracomm) -> argparse.Namespace:
    """What rank 0 was asked for: it speaks and writes, maybe on a machine with other folders than the others have."""
    options, status = None, 0
    if world.rank == 0:
        try:
            options = _parsed()
        except SystemExit as ended:
            status = int(ended.code or 0)
    options, status = world.bcast((options, status), root=0)
    if options is None:
        sys.exit(status)
    return options


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=target, metavar="FILE", help="write everything to FILE for programs; - is standard output"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it; .png, .pdf or .svg")
    add = parser.add_argument
    add("--seconds", type=above_zero, default=0.3, metavar="S", help="for each measurement of a link; 0.3")
    pairs = "with more pairs of hosts only some are taken; 400"
    add("--most-pairs", type=at_least(1), default=400, metavar="N", help=pairs)
    add("--entries", type=at_least(1), default=5_000_000, metavar="N", help="of the tensor selected from; 5e6")
    add("--density", type=share, default=0.01, metavar="D", help="share selected; 0.01")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where something is wrong")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)  # the others may wait for this rank
        raise
    sys.exit(status)
