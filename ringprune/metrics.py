"""Bytes, densities and seconds: plain counters that cost nothing to keep, and the ratios made of them.

Definitions (docs/wire-format.md): ``bytes_sent`` is what this rank hands to the network, payload and headers (mean over
the ranks); ``wire_ratio`` is the bytes a dense fp32 allreduce would have sent in the same steps, divided by that; its
``steady`` form leaves warm-up out; ``value_ratio`` divides by the bytes of values alone, those of dense tensors
included. One rank sends nothing; there the ratios compare the payloads that would have been sent.

In a hierarchy it is nodes that exchange: their first ranks count what they send to each other, and a dense allreduce
among them is the dense equivalent. The other ranks count only the messages that all ranks make (headers). Bytes inside
a node are counted apart.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ringprune.comm.communicator import Nodes, Traffic

__all__ = ["CONTENTS", "Content", "Metrics", "Stage"]

Content = Literal["values", "indices", "dense", "headers"]
Stage = Literal["accumulate", "select", "agree", "pack", "reduce", "unpack", "node"]
CONTENTS: tuple[Content, ...] = ("values", "indices", "dense", "headers")
STAGES: tuple[Stage, ...] = ("accumulate", "select", "agree", "pack", "reduce", "unpack", "node")


@dataclass
class _Ledger:
    """Sums over a stretch of training: bytes on the network and payload bytes by content, and entries selected."""

    sent: dict[Content, float] = field(default_factory=lambda: dict.fromkeys(CONTENTS, 0.0))
    payload: dict[Content, float] = field(default_factory=lambda: dict.fromkeys(CONTENTS, 0.0))
    dense_sent: float = 0.0
    dense_payload: float = 0.0
    selected: int = 0
    candidates: int = 0

    def ratio(self, size: int, contents: tuple[Content, ...] = CONTENTS) -> float:
        """Dense fp32 bytes over the bytes of ``contents``; 1 while nothing was sent."""
        dense, used = (self.dense_sent, self.sent) if size > 1 else (self.dense_payload, self.payload)
        bytes_used = sum(used[content] for content in contents)
        return dense / bytes_used if dense and bytes_used else 1.0

    @property
    def realised_density(self) -> float:
        return self.selected / self.candidates if self.candidates else 1.0


class Metrics:
    """What one wrapper sent and how long its stages took.

    Args:
        traffic: the communicator's byte counter; every message is counted there, and attributed here.
        numel: entries of all exchanged parameters, for the dense equivalent.
        nodes: in a hierarchy what the exchange travels over; ``traffic`` then counts what all ranks send besides.
    """

    def __init__(self, traffic: Traffic, numel: int, nodes: Nodes | None = None) -> None:
        self.steps = 0
        self.skipped_steps = 0
        self.density = 1.0
        self._counted, self._size, self._numel = [traffic], traffic.size, numel
        self._local = None if nodes is None else nodes.local.traffic
        if nodes is not None:
            self._size = nodes.count
            if nodes.across is None:
                self._numel = 0  # of what nodes send to each other, this rank sends nothing
            else:
                self._counted.append(nodes.across.traffic)
        self._total = _Ledger()
        self._steady = _Ledger()
        self._ledgers = [self._total]
        self._buckets: dict[int, dict[Content, float]] = {}
        self._parameters: dict[str, dict[Content, float]] = {}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._exchanged_steps = 1

    def begin(self, density: float, *, steady: bool, steps: int = 1) -> None:
        """An exchange for ``steps`` optimizer steps starts, at this density; ``steady`` once warm-up is over."""
        self.density, self._exchanged_steps = density, steps
        self._ledgers = [self._total, self._steady] if steady else [self._total]

    def exchanged(self) -> None:
        """The exchange was made: what dense fp32 allreduces would have sent in its steps is added."""
        payload = 4 * self._numel * self._exchanged_steps
        for ledger in self._ledgers:
            ledger.dense_payload += payload
            ledger.dense_sent += 2 * (self._size - 1) / self._size * payload

    def selected(self, entries: int, candidates: int) -> None:
        """An index set of ``entries`` out of ``candidates`` was agreed."""
        for ledger in self._ledgers:
            ledger.selected += entries
            ledger.candidates += candidates

    @contextmanager
    def sending(self, content: Content | Mapping[Content, float], bucket: int | None = None) -> Iterator[None]:
        """Attribute what the communicator counts meanwhile to ``content``, and to a bucket where it is one's.

        Several contents get the shares given: pairs of an index and a value are sent in one message.
        """
        sent, payload = self._so_far()
        try:
            yield
        finally:  # what was sent before a failure was sent
            self._attribute(content, bucket, sent, payload)

    def _attribute(
        self, content: Content | Mapping[Content, float], bucket: int | None, sent: float, payload: float
    ) -> None:
        """What was counted since ``sent`` and ``payload`` is of these contents."""
        sent, payload = (now - before for now, before in zip(self._so_far(), (sent, payload), strict=True))
        shares: Mapping[Content, float] = {content: 1.0} if isinstance(content, str) else content
        for name, share in shares.items():
            for ledger in self._ledgers:
                ledger.sent[name] += share * sent
                ledger.payload[name] += share * payload
            if bucket is not None:
                self._buckets.setdefault(bucket, dict.fromkeys(CONTENTS, 0.0))[name] += share * sent

    def _so_far(self) -> tuple[float, float]:
        """Bytes sent and payload bytes that the communicators have counted."""
        return sum(t.bytes_sent for t in self._counted), sum(t.payload_bytes for t in self._counted)

    def of_bucket(self, bucket: int) -> dict[Content, float]:
        """Bytes that a bucket has sent, by content."""
        return self._buckets.get(bucket, dict.fromkeys(CONTENTS, 0.0))

    def of_parameter(self, name: str) -> dict[Content, float]:
        """Bytes that a parameter has sent in buckets of before, by content; headers are of none."""
        return dict(self._parameters.get(name, dict.fromkeys(CONTENTS, 0.0)))

    def divide_anew(self, so_far: Mapping[str, Mapping[Content, float]]) -> None:
        """Buckets will be others from now on; what parameters have sent in those of before is given."""
        self._parameters = {name: {**sent, "headers": 0.0} for name, sent in so_far.items()}
        self._buckets.clear()

    @property
    def headers(self) -> float:
        """Bytes sent that are of no bucket."""
        return self._total.sent["headers"]

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Add the wall time spent inside to the seconds of stage ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def stats(self) -> dict[str, Any]:
        """All counters and ratios as plain numbers; bytes are of this rank since construction."""
        total, size = self._total, self._size
        steady = self._steady if self._steady.dense_payload else total
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "bytes_sent": sum(total.sent.values()),
            **{f"bytes_{content}": total.sent[content] for content in CONTENTS},
            "bytes_inside_node": 0.0 if self._local is None else self._local.bytes_sent,
            "dense_equivalent_bytes": total.dense_sent,
            "steady_bytes_sent": sum(self._steady.sent.values()),
            "steady_dense_equivalent_bytes": self._steady.dense_sent,
            "wire_ratio": total.ratio(size),
            "steady_wire_ratio": steady.ratio(size),
            "value_ratio": total.ratio(size, ("values", "dense")),
            "density": self.density,
            "realised_density": steady.realised_density,
            "seconds": dict(self._seconds),
        }
