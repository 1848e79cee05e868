"""A link, and what a collective takes on it: the alpha-beta model, by the best of the usual algorithms.

After: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005: a message of B bytes takes alpha + B / beta, and a collective as many of these as its algorithm has hops.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

from ringprune.errors import ConfigurationError
from ringprune.validation import real_number

__all__ = ["GOODPUT", "LATENCY_SECONDS", "Kind", "Link", "MeasuredLink", "Network"]

Kind = Literal["allreduce", "broadcast", "allgather", "alltoall", "ring"]

GOODPUT = 1448 / 1538
"""Share of Ethernet's nominal rate that is payload of TCP: of a frame's 1500 bytes 52 are headers of IP and TCP (with
timestamps), and 38 more bytes are Ethernet's header, checksum, preamble and gap (IEEE 802.3)."""

LATENCY_SECONDS = 50e-6
"""From one rank to another over TCP on one switch, the library's share included: assumed, not measured."""


class Network(Protocol):
    """What tells how long collectives take."""

    def seconds(self, kind: Kind, payload: float, ranks: int) -> float:
        """What a collective takes while nothing else is sent; see :meth:`Link.seconds`."""


@dataclass(frozen=True)
class Link:
    """The link of each rank to a network that holds nobody else up; both directions at once.

    Args:
        bytes_per_second: of payload, above 0; infinity where nothing limits it.
        latency_seconds: what a message of no bytes takes.
        shares: of that rate what collectives of each kind reach, in (0, 1]; all of it where a kind is not named.
    """

    bytes_per_second: float
    latency_seconds: float = LATENCY_SECONDS
    shares: Mapping[Kind, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, share in self.shares.items():
            real_number(f"shares[{kind!r}]", share, above=0, most=1)
        if self.bytes_per_second != float("inf"):
            real_number("bytes_per_second", self.bytes_per_second, above=0)
        real_number("latency_seconds", self.latency_seconds, least=0)

    @classmethod
    def of_rate(
        cls,
        bits_per_second: float,
        latency_seconds: float = LATENCY_SECONDS,
        goodput: float = GOODPUT,
        shares: Mapping[Kind, float] | None = None,
    ) -> "Link":
        """The link of a nominal rate, of which ``goodput`` is payload."""
        return cls(bits_per_second / 8 * goodput, latency_seconds, shares or {})

    def seconds(self, kind: Kind, payload: float, ranks: int) -> float:
        """What a collective takes while nothing else is sent.

        Args:
            kind: what is called; ``"ring"`` is our own ring.
            payload: its bytes: the message of a broadcast, the buffer of an allreduce, all ranks' parts together of an
                allgather; of an alltoall and of our ring what each rank sends to others.
            ranks: how many take part.
        """
        if ranks == 1:
            return 0.0
        ways, reached = _ways(kind, payload, ranks), self.bytes_per_second * self.shares.get(kind, 1.0)
        return min(hops * self.latency_seconds + sent / reached for hops, sent in ways)


@dataclass(frozen=True)
class MeasuredLink:
    """The ranks' links as their collectives have found them: straight lines between what was measured.

    Args:
        points: of each kind of collective pairs of payload in bytes, as :meth:`Link.seconds` takes it, and seconds; two
            or more, payloads ascending.
        ranks: who measured; times of any other number of ranks are not known.

    Raises:
        ConfigurationError: there are too few points of a kind, or payloads do not ascend.
    """

    points: Mapping[Kind, tuple[tuple[float, float], ...]]
    ranks: int

    def __post_init__(self) -> None:
        for kind, points in self.points.items():
            if len(points) < 2 or any(a[0] >= b[0] for a, b in pairwise(points)):
                raise ConfigurationError(f"{kind}: two points or more, payloads ascending; got {points}")

    def seconds(self, kind: Kind, payload: float, ranks: int) -> float:
        """What a collective takes; beyond the largest message that was measured as from the smallest to it.

        Raises:
            ConfigurationError: the kind, or that number of ranks, was not measured.
        """
        if ranks == 1:
            return 0.0
        if kind not in self.points or ranks != self.ranks:
            raise ConfigurationError(f"{kind} was not measured on {ranks} ranks")
        points = self.points[kind]
        last = points[-1][0]
        if payload <= last:
            return _between(next(pair for pair in pairwise(points) if payload <= pair[1][0]), payload)
        # The last two lie too near to each other to go on from: what noise they have would grow with the message.
        return max(_between((points[-2], points[-1]), last), _between((points[0], points[-1]), payload))

    @property
    def bytes_per_second(self) -> float:
        """What the longest allreduce that was measured sent and received per second, on each rank."""
        payload, seconds = self.points["allreduce"][-1]
        return 2 * (self.ranks - 1) / self.ranks * payload / max(seconds, 1e-9)


def _between(ends: tuple[tuple[float, float], tuple[float, float]], payload: float) -> float:
    """On the line through two points; noise may have made the longer message the quicker one, no longer one is that."""
    (low, at_low), (high, at_high) = ends
    return max(0.0, at_low + max(0.0, at_high - at_low) / (high - low) * max(0.0, payload - low))


def _ways(kind: Kind, payload: float, ranks: int) -> list[tuple[int, float]]:
    """Hops one after the other, and bytes that pass the busiest link, of each algorithm that libraries know."""
    others, doublings = ranks - 1, (ranks - 1).bit_length()
    share = others / ranks
    if kind == "allreduce":  # the ring; recursive doubling
        return [(2 * others, 2 * share * payload), (doublings, doublings * payload)]
    if kind == "broadcast":  # a binomial tree; a chain in small pieces
        return [(doublings, doublings * payload), (others, payload)]
    if kind == "allgather":  # recursive doubling, or Bruck's
        return [(doublings, share * payload)]
    return [(others if kind == "alltoall" else 2 * others, payload)]
