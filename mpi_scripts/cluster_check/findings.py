"""Finds what is wrong with a job's ranks and links, and says it in one line each."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from .links import Links
from .ranks import Rank, hosts_of

__all__ = ["find", "rate"]

SLOW = 0.7  # of the median
LATE = 10.0  # times the median
CROWDED = 0.6  # of what the slowest link does alone


def find(ranks: Sequence[Rank], places: Sequence[str], links: Links) -> list[str]:
    """Warnings, the gravest first.

    Args:
        ranks: all of them.
        places: names of what the links are between.
        links: as measured.
    """
    return [*_about_ranks(ranks), *_about_links(places, links)]


def rate(bits_per_second: float) -> str:
    """For people."""
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.2f} Gbit/s"
    return f"{bits_per_second / 1e6:.1f} Mbit/s"


def _about_ranks(ranks: Sequence[Rank]) -> Iterator[str]:
    hosts = hosts_of(ranks)
    if len(hosts) == 1 and len(ranks) > 1:
        yield f"all {len(ranks)} ranks are on one host, {hosts[0]}: name more (mpirun --host, horovodrun -H, sbatch -N)"
    machines: dict[str, list[Rank]] = {}
    for each in ranks:
        machines.setdefault(each.machine, []).append(each)
    for here in machines.values():
        yield from _about_machine(here)
    counts = Counter(each.host for each in ranks)
    if len(set(counts.values())) > 1:
        yield "hosts have different numbers of ranks: " + ", ".join(f"{host} {n}" for host, n in counts.items())
    if (level := ranks[0].thread_level) != "multiple":
        yield (
            f"MPI gives thread level {level}; Horovod calls MPI from a thread of its own beside the script's and wants "
            "multiple: use an MPI built with it"
        )
    for name in ranks[0].versions:
        found = {each.host: each.versions.get(name, "none") for each in ranks}
        if len(set(found.values())) > 1:
            yield f"{name} differs: " + ", ".join(f"{host} {version}" for host, version in found.items())


def _about_machine(here: Sequence[Rank]) -> Iterator[str]:
    names, cores = hosts_of(here), {core for each in here for core in each.cores}
    where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, which are one machine"
    if len(here) > len(cores):
        yield f"{len(here)} ranks share {len(cores)} cores on {where}: times there say little"
        return
    threads = [int(each.threads) if each.threads and each.threads.isdigit() else len(each.cores) for each in here]
    if len(here) > 1 and sum(threads) > len(cores):
        yield f"{sum(threads)} threads of {len(here)} ranks share {len(cores)} cores on {where}: set OMP_NUM_THREADS"


def _about_links(places: Sequence[str], links: Links) -> Iterator[str]:
    if len(links.pairs) < 2:
        return
    median = statistics.median(pair.bits_per_second for pair in links.pairs.values())
    slow = {pair for pair, found in links.pairs.items() if found.bits_per_second < SLOW * median}
    # A place whose links are all slow in one direction is named itself, rather than each of them.
    explained: set[tuple[int, int]] = set()
    for i, place in enumerate(places):
        for side, says in enumerate(("sends", "receives")):
            own = {pair for pair in links.pairs if pair[side] == i}
            if len(own) > 1 and slow.issuperset(own):
                explained |= own
                fastest = max(links.pairs[pair].bits_per_second for pair in own)
                yield f"{place} {says} slowly: {rate(fastest)} at most, the median link has {rate(median)}"
    for i, j in sorted(slow - explained):
        found = links.pairs[i, j].bits_per_second
        yield f"the link {places[i]} -> {places[j]} is slow: {rate(found)}, the median link has {rate(median)}"
    yield from _about_waiting(places, links)


def _about_waiting(places: Sequence[str], links: Links) -> Iterator[str]:
    latency = statistics.median(pair.seconds for pair in links.pairs.values())
    for (i, j), pair in sorted(links.pairs.items()):
        if pair.seconds > LATE * latency:
            late = f"{1e6 * pair.seconds:.0f} us, the median is {1e6 * latency:.0f} us"
            yield f"the link {places[i]} -> {places[j]} is late: {late}"
    ring = [links.pairs[i, (i + 1) % len(places)].bits_per_second for i in range(len(places))]
    if min(links.ring) < CROWDED * min(ring):
        both = f"{rate(min(links.ring))}, alone {rate(min(ring))}"
        yield f"with all sending at once a link does {both}: a switch, a core or an adapter is shared"
