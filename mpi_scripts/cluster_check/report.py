"""The result of a check: as one record for programs, and as tables for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .findings import rate
from .links import Links
from .ranks import Rank

__all__ = ["Report", "show"]

BYTES_OF_VALUE = BYTES_OF_INDEX = 4


@dataclass(frozen=True)
class Report:
    """All that a check has found.

    Attributes:
        mpi: vendor and version.
        ranks: all of them.
        places: names of what the links are between: hosts, or the ranks of the only host.
        links: as measured.
        entries: of the tensor that selection was timed on.
        density: share of it that was selected.
        selection: seconds of one selection pass, by host.
        warnings: one line each.
    """

    mpi: str
    ranks: list[Rank]
    places: list[str]
    links: Links
    entries: int
    density: float
    selection: dict[str, float]
    warnings: list[str]

    @property
    def record(self) -> dict[str, Any]:
        """What ``--json`` writes; bandwidths in bit/s, times in seconds."""
        pairs = [
            {"from": self.places[i], "to": self.places[j], **asdict(pair)} for (i, j), pair in self.links.pairs.items()
        ]
        following = [*self.places[1:], *self.places[:1]]
        hops = zip(self.places, following, self.links.ring, strict=True) if self.links.ring else ()
        ring = [{"from": place, "to": after, "bits_per_second": bits} for place, after, bits in hops]
        return {
            "mpi": self.mpi,
            "ranks": [asdict(each) for each in self.ranks],
            "pairs": pairs,
            "ring": ring,
            "selection": {"entries": self.entries, "density": self.density, "seconds": self.selection},
            "network": self.network_seconds,
            "warnings": self.warnings,
        }

    @property
    def network_seconds(self) -> dict[str, float]:
        """Seconds the slowest link of the ring needs for ``entries`` float32, dense and packed; empty for one place.

        Packed is a broadcast of indices from one root and an allreduce of the values there (docs/wire-format.md).
        """
        if not self.links.ring:
            return {}
        size, seconds_per_byte = len(self.places), 8 / min(self.links.ring)
        share = (size - 1) / size
        kept = max(1, round(self.density * self.entries))
        return {
            "dense": 2 * share * BYTES_OF_VALUE * self.entries * seconds_per_byte,
            "packed": share * (BYTES_OF_INDEX + 2 * BYTES_OF_VALUE) * kept * seconds_per_byte,
        }


def show(report: Report) -> str:
    """Tables and warnings."""
    level = report.ranks[0].thread_level
    parts = [f"{report.mpi}, thread level {level}", _rank_table(report.ranks)]
    if report.links.pairs:
        bandwidth = {pair: rate(found.bits_per_second) for pair, found in report.links.pairs.items()}
        latency = {pair: f"{1e6 * found.seconds:.0f}" for pair, found in report.links.pairs.items()}
        parts += [
            "bandwidth, one pair at a time (row sends to column)\n" + _matrix(report.places, bandwidth),
            "latency in us: half a round trip of one byte, median\n" + _matrix(report.places, latency),
            f"ring, all at once: each sends {rate(min(report.links.ring))} to {rate(max(report.links.ring))}",
        ]
    parts.append(_costs(report))
    parts.append("\n".join(f"WARNING: {text}" for text in report.warnings) or "nothing to warn of")
    return "\n\n".join(parts)


def _rank_table(ranks: Sequence[Rank]) -> str:
    rows = [["rank", "host", "local rank", "cores", "OMP_NUM_THREADS"]]
    for each in ranks:
        rows.append([str(each.rank), each.host, str(each.local_rank), _ranges(each.cores), each.threads or "-"])
    return _table(rows)


def _matrix(places: Sequence[str], cells: dict[tuple[int, int], str]) -> str:
    rows = [["", *places]]
    for i, place in enumerate(places):
        rows.append([place, *(cells.get((i, j), "-") for j in range(len(places)))])
    return _table(rows)


def _costs(report: Report) -> str:
    times = list(report.selection.values())
    spread = f"{1e3 * min(times):.1f} ms" + (f" to {1e3 * max(times):.1f} ms" if len(times) > 1 else "")
    lines = [
        f"{report.entries:,} weights at density {100 * report.density:g} %:",
        f"  selecting (one pass, on a root): {spread}; by host: "
        + ", ".join(f"{host} {1e3 * seconds:.1f}" for host, seconds in report.selection.items()),
    ]
    if network := report.network_seconds:
        lines += [
            f"  sending all of them, at the ring's slowest link: {1e3 * network['dense']:.1f} ms",
            f"  sending the selected ones (one root, list of indices): {1e3 * network['packed']:.1f} ms",
        ]
    return "\n".join(lines)


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 as 0-2,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
