"""When a bucket or a slice of a tensor is sent: as it comes, or first what the next forward pass needs first (P3).

Priority-based Parameter Propagation (Jayarajan and others, arXiv 1905.03960) sends the gradients of the first layers
before those of the last, though backward makes them last, and cuts large tensors into slices so that urgent ones need
not wait long. The credit, a bound of the bytes outstanding at a time, is ByteScheduler's (Peng and others, SOSP 2019):
with less of it urgent slices overtake sooner, with too little the link runs dry.
"""

import heapq
from dataclasses import dataclass

from ringprune.validation import whole_number

__all__ = ["LayerPriority", "Queue"]


@dataclass(frozen=True)
class LayerPriority:
    """First layers first, across the barrier between two steps: a layer's forward pass waits for that layer alone.

    Slices for an allreduce are much larger than the paper's 200 kB for a parameter server, since each costs a latency
    per rank. The defaults were measured at 4 and 15 Gbit/s and without a limit (docs/benchmarks.md, Scheduling).

    Args:
        slice_bytes: a tensor that travels dense is cut into slices of at most this many bytes, as float32; 4 or more.
        credit_bytes: bytes outstanding at a time; one bucket may always be under way, whatever its size.
        fuse_bytes: neighbouring small tensors travel together in buckets up to this size.

    Raises:
        ConfigurationError, ArgumentTypeError: one of them is no whole number, or too small.
    """

    slice_bytes: int = 4 << 20
    credit_bytes: int = 8 << 20
    fuse_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        whole_number("slice_bytes", self.slice_bytes, 4)
        whole_number("credit_bytes", self.credit_bytes, 1)
        whole_number("fuse_bytes", self.fuse_bytes, 0)


class Queue:
    """What is ready to be sent, the most urgent first, with at most ``credit`` bytes outstanding.

    Args:
        credit: bytes that may be outstanding; what alone is more may go where nothing else is.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._ready: list[tuple[int, int, int]] = []  # priority, item, bytes
        self._outstanding: dict[int, int] = {}

    def push(self, item: int, *, priority: int, nbytes: int) -> None:
        """``item`` is ready; a lower ``priority`` is more urgent, and among equals the lower item."""
        heapq.heappush(self._ready, (priority, item, nbytes))

    def pop(self, *, beyond: bool = False) -> int | None:
        """The most urgent item, which is outstanding from now on; None where nothing is ready or credit is used up.

        Args:
            beyond: go beyond the credit.
        """
        if not self._ready:
            return None
        _, item, nbytes = self._ready[0]
        if self._outstanding and self.outstanding + nbytes > self._credit and not beyond:
            return None
        heapq.heappop(self._ready)
        self._outstanding[item] = nbytes
        return item

    def give_back(self, item: int) -> None:
        """``item`` was sent."""
        del self._outstanding[item]

    @property
    def outstanding(self) -> int:
        """Bytes that were popped and not given back."""
        return sum(self._outstanding.values())

    def __len__(self) -> int:
        return len(self._ready)
