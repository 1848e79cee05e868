"""A link, and what a collective takes on it: the alpha-beta model, by the best of the usual algorithms.

After: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005: a message of B bytes takes alpha + B / beta, and a collective as many of these as its algorithm has hops.
"""

from dataclasses import dataclass
from typing import Literal

from ringprune.validation import real_number

__all__ = ["GOODPUT", "LATENCY_SECONDS", "Kind", "Link"]

Kind = Literal["allreduce", "broadcast", "allgather", "alltoall", "ring"]

GOODPUT = 1448 / 1538
"""Share of Ethernet's nominal rate that is payload of TCP: of a frame's 1500 bytes 52 are headers of IP and TCP (with
timestamps), and 38 more bytes are Ethernet's header, checksum, preamble and gap (IEEE 802.3)."""

LATENCY_SECONDS = 50e-6
"""From one rank to another over TCP on one switch, the library's share included: assumed, not measured."""


@dataclass(frozen=True)
class Link:
    """The link of each rank to a network that holds nobody else up; both directions at once.

    Args:
        bytes_per_second: of payload, above 0; infinity where nothing limits it.
        latency_seconds: what a message of no bytes takes.
    """

    bytes_per_second: float
    latency_seconds: float = LATENCY_SECONDS

    def __post_init__(self) -> None:
        if self.bytes_per_second != float("inf"):
            real_number("bytes_per_second", self.bytes_per_second, above=0)
        real_number("latency_seconds", self.latency_seconds, least=0)

    @classmethod
    def of_rate(
        cls, bits_per_second: float, latency_seconds: float = LATENCY_SECONDS, goodput: float = GOODPUT
    ) -> "Link":
        """The link of a nominal rate, of which ``goodput`` is payload."""
        return cls(bits_per_second / 8 * goodput, latency_seconds)

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
        ways = _ways(kind, payload, ranks)
        return min(hops * self.latency_seconds + sent / self.bytes_per_second for hops, sent in ways)


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
