"""A table of whose gradient every rank has some rows: they travel as rows, by the cheapest way, and stay sparse."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringprune import ops
from ringprune.comm.communicator import Handle
from ringprune.errors import CommunicatorError
from ringprune.exchange.lane import Lane, Setting, StateOf, UnderWay
from ringprune.metrics import Content
from ringprune.plan import Bucket
from ringprune.reduction import GatheredRows, OwnedRows, RowSets, spread, sum_rows
from ringprune.residual import Correction
from ringprune.routing import Rows, cheapest, expected_union, way_costs
from ringprune.wire import ValueCode, value_code

__all__ = ["RowsLane"]

Started = TypeVar("Started")


class RowsLane(Lane):
    """The sum of one table's sparse gradients; nothing is kept between steps but how much the ranks overlapped.

    First all ranks tell how many rows they have. From that each computes the same way, and none sends a thing where
    nobody has any.

    Args:
        bucket: the table alone.
        setting: what it shares with the other lanes.

    Attributes:
        taken: how many steps have been made each way.
    """

    def __init__(self, bucket: Bucket, setting: Setting) -> None:
        super().__init__(bucket, setting, "values")
        assert setting.policy.rows is not None, "a bucket of rows under a policy without"
        self._choice: Rows = setting.policy.rows
        self._shape = setting.weights[bucket.members[0]].shape
        self._length, self._width = self._shape[0], self._shape[1:].numel()
        self._name = f"bucket {bucket.index} rows"
        self._rows = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")
        self._counts: list[int] = []
        self._told: Handle | None = None
        self._sets: RowSets | None = None
        self._gathered: GatheredRows | None = None
        self._owned: OwnedRows | None = None
        self._union: Tensor | None = None
        self._way: str | None = None
        # What the step before had: rows that some rank had, and the sum over the ranks.
        self._last = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.taken: Counter[str] = Counter()

    def _code(self) -> ValueCode | None:
        return value_code(self._choice.values) if self.bucket.dtype == torch.float32 else None

    def _begin(self, step: int, corrected: Sequence[Tensor], correction: Correction) -> Tensor:
        """Take the rows: ``corrected`` is one coalesced sparse gradient."""
        with self._setting.metrics.stage("pack"):
            self._rows = corrected[0].indices()[0]
            values = corrected[0].values().reshape(-1, self._width)
            self._values = values.to(self.bucket.dtype)
            if correction.factors[0] != 1.0:
                self._values = self._values * correction.factors[0]
            self._values = self._values.contiguous()
            return ops.count_nonfinite([values.contiguous()])

    def _messages(self, step: int) -> Iterator[UnderWay | None]:
        comm = self._setting.comm
        self._way = self._told = self._sets = self._gathered = self._owned = self._union = None
        number = torch.tensor([self._rows.numel()], dtype=torch.int32, device=self.bucket.device)
        self._told = self._send("indices", lambda: comm.allgather(number, name=f"{self._name}: how many"))
        yield self._told
        self._counts = self._checked(self._told.wait().tolist())
        self._told = None
        if not any(self._counts):
            return
        self._way = self._choice.way if self._choice.way != "auto" else self._cheapest()
        if self._way == "owners":
            yield from self._to_owners()
            return
        lengths, name = [self._length] * comm.size, f"{self._name}: numbers"
        sets = self._send("indices", lambda: RowSets(comm, self._rows, self._counts, lengths, name=name))
        self._sets = sets
        if self._way == "gather":
            self._gathered = self._send(
                "values", lambda: GatheredRows(comm, self._values, self._counts, self._code(), name=self._name)
            )
            return
        among: Tensor | int = self._length
        if self._way == "union":
            yield sets
            among = self._union = torch.unique(torch.cat(sets.wait()))
            self._sets = None
        self._reduce(spread(self._rows, self._values, among).view(-1))
        yield from self._rounds()

    def _to_owners(self) -> Iterator[UnderWay | None]:
        comm, code = self._setting.comm, self._code()
        owned = self._send(
            "indices", lambda: OwnedRows(comm, self._rows, self._values, self._length, code, name=self._name)
        )
        self._owned = owned
        yield owned
        self._send("indices", owned.push_sets)
        self._send("values", owned.push_values)
        yield owned
        self._send("indices", owned.tell)
        yield owned
        self._send("indices", owned.gather_sets)
        self._send("values", owned.gather_values)

    def _send(self, content: Content, start: Callable[[], Started]) -> Started:
        with self._setting.metrics.stage("reduce"), self._setting.metrics.sending(content, self.bucket.index):
            return start()

    def _checked(self, counts: list[int]) -> list[int]:
        wrong = {rank: count for rank, count in enumerate(counts) if not 0 <= count <= self._length}
        if wrong:
            raise CommunicatorError(f"{self._name}: by rank, {wrong} rows of a table of {self._length}")
        return counts

    def _cheapest(self) -> str:
        """The way of the fewest bytes, from what all ranks know."""
        union, total = self._last.tolist()
        row_bytes = self._width * (self.bucket.dtype.itemsize if self._code() is None else 2)
        expected = expected_union(self._counts, self._length, (union, total))
        return cheapest(way_costs(self._counts, self._length, row_bytes, expected))

    def reduced(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return super().reduced() and all(each.done() for each in self._under_way_beside())

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the sums, and make the sparse tensor given the average at all ranks' rows, coalesced."""
        rows, averages = self._averages()
        with self._setting.metrics.stage("unpack"):
            values = averages.to(outputs[0].dtype).view(-1, *self._shape[1:])
            made = torch.sparse_coo_tensor(
                rows[None], values, self._shape, device=values.device, is_coalesced=True, check_invariants=False
            )
            outputs[0].copy_(made)
        if self._way is not None:
            self.taken[self._way] += 1
            self._last.copy_(torch.tensor([rows.numel(), sum(self._counts)], device="cpu"))
        self._forget_messages()

    def _averages(self) -> tuple[Tensor, Tensor]:
        """The rows that some rank has, and their averages, one row each."""
        size, mean, metrics = self._setting.comm.size, self._setting.mean, self._setting.metrics
        if self._way is None:
            return self._rows, self._values
        if self._way in ("gather", "owners"):
            with metrics.stage("reduce"):
                if self._owned is not None:
                    rows, sums = self._owned.wait()
                else:
                    assert self._sets is not None
                    assert self._gathered is not None
                    rows, sums = sum_rows(self._sets.wait(), self._gathered.wait(), self._values)
                mean.scale(sums, size)
                return rows, sums
        table = self._wait()[0].view(-1, self._width)
        if self._union is not None:
            return self._union, table
        assert self._sets is not None
        with metrics.stage("reduce"):
            union = torch.unique(torch.cat(self._sets.wait()))
        return union, table[union]

    def _under_way_beside(self) -> list[RowSets | GatheredRows | OwnedRows]:
        """What is under way besides an allreduce."""
        return [each for each in (self._sets, self._gathered, self._owned) if each is not None]

    def abandon(self) -> None:
        """The step is not made: wait for what is under way and forget it."""
        if self._reduction is not None:
            super().abandon()
        for each in self._under_way_beside():
            each.drain()
        self._forget_messages()

    def _forget_messages(self) -> None:
        self._sets = self._gathered = self._owned = self._union = self._way = None
        self._rows, self._values = self._rows[:0].clone(), self._values[:0].clone()

    def state(self) -> StateOf:
        """How much the ranks overlapped: the next step's way follows from it."""
        return {self.bucket.members[0]: {"overlap": self._last}}
