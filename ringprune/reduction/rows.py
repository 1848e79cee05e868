"""Stage 6: sum rows of a table of which every rank has some: gathered whole, or by the rank that owns each row.

Everybody knows how many rows each rank has, so messages carry no sizes. Sums are made in the order of the ranks, in the
dtype of the values, so that every rank has the same bytes.
After: S. Kim and others, "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", EuroSys 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator, Handle
from ringprune.devices import to_device
from ringprune.errors import CommunicatorError
from ringprune.reduction.reduction import ValueCode
from ringprune.row_sets import decode_rows, encode_rows, set_words

__all__ = ["GatheredRows", "OwnedRows", "RowSets", "spread", "sum_rows"]

DAMAGED = -1
"""Told instead of a number of rows by a rank that got damaged ones."""

TableRows = tuple[Tensor, Tensor]
"""Numbers of rows, int64, ascending, and their values, one row each."""


class RowSets:
    """Every rank's set of rows, on the way to all.

    Args:
        comm: with whom.
        rows: this rank's, int64, ascending.
        counts: rows of each rank.
        lengths: rows of the table that each rank's set is of.
        name: what errors call it.
    """

    def __init__(
        self, comm: Communicator, rows: Tensor, counts: Sequence[int], lengths: Sequence[int], *, name: str
    ) -> None:
        self._counts, self._lengths, self._name = counts, lengths, name
        self._words = [set_words(count, length) for count, length in zip(counts, lengths, strict=True)]
        self._handle = comm.allgather(encode_rows(rows, lengths[comm.rank]), sizes=self._words, name=name)

    def done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._handle.done()

    def drain(self) -> None:
        """Wait and forget it."""
        self._handle.wait()

    def wait(self) -> list[Tensor]:
        """The sets in the order of the ranks.

        Raises:
            CommunicatorError: one of them is damaged; on all ranks.
        """
        parts = torch.split(self._handle.wait(), self._words)
        return [
            decode_rows(part, count, length, f"{self._name} of rank {rank}")
            for rank, (part, count, length) in enumerate(zip(parts, self._counts, self._lengths, strict=True))
        ]


class GatheredRows:
    """Every rank's values, on the way to all; their sets of rows are told apart from them.

    Args:
        comm: with whom.
        values: this rank's, shape ``(count, width)``, contiguous.
        counts: rows of each rank.
        code: how values travel, float32 ones; None as they are.
        name: what errors call it.
    """

    def __init__(
        self, comm: Communicator, values: Tensor, counts: Sequence[int], code: ValueCode | None, *, name: str
    ) -> None:
        self._values, self._counts, self._code, self._name = values, counts, code, name
        sizes = [row_units(count, values.shape[1], code) for count in counts]
        self._sizes = sizes
        self._handle = comm.allgather(_message(values, code), sizes=sizes, name=name)

    def done(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._handle.done()

    def drain(self) -> None:
        """Wait and forget it."""
        self._handle.wait()

    def wait(self) -> list[Tensor]:
        """The values in the order of the ranks.

        Raises:
            CommunicatorError: a message is damaged; on all ranks.
        """
        parts = torch.split(self._handle.wait(), self._sizes)
        return [
            _values(part, count, self._values, self._code, f"{self._name} of rank {rank}")
            for rank, (part, count) in enumerate(zip(parts, self._counts, strict=True))
        ]


class OwnedRows:
    """A sum by owners: row ``i`` is summed by rank ``i mod P``, so that hot rows spread, and the sums go to all.

    Making it starts the first message; then :meth:`push_sets` and :meth:`push_values`, :meth:`tell`,
    :meth:`gather_sets` and :meth:`gather_values`, and :meth:`wait`. Each but the second of a pair waits for what is
    under way.

    Args:
        comm: a communicator with the ability ``"alltoall"``.
        rows: this rank's, int64, ascending.
        values: theirs, shape ``(count, width)``, contiguous.
        length: rows of the table.
        code: how values travel, float32 ones; None as they are.
        name: what errors call it.
    """

    def __init__(
        self, comm: Communicator, rows: Tensor, values: Tensor, length: int, code: ValueCode | None, *, name: str
    ) -> None:
        self._comm, self._values, self._code, self._name = comm, values, code, name
        self._lengths = [max(0, -(-(length - owner) // comm.size)) for owner in range(comm.size)]
        owners = rows % comm.size
        counts = torch.bincount(owners, minlength=comm.size)
        order = torch.argsort(owners, stable=True)
        self._pieces = torch.split(order, counts.tolist())  # for each owner, where its rows are among this rank's
        self._places = torch.div(rows, comm.size, rounding_mode="floor")
        self._fault: CommunicatorError | None = None
        self._sums: TableRows = rows, values
        self._counts = [piece.numel() for piece in self._pieces]
        told = counts.to(torch.int32)
        ones = [1] * comm.size
        self._handles: list[Handle] = [
            comm.alltoall(told, splits=ones, received=ones, name=f"{name}: numbers of pieces")
        ]

    def done(self) -> bool:
        """Whether nothing under way has to be waited for."""
        if not self._handles:
            return self._sets.done() and self._gathered.done()
        return all(handle.done() for handle in self._handles)

    def push_sets(self) -> None:
        """Send every owner the numbers of its rows."""
        told = self._handles[0].wait()
        own = self._lengths[self._comm.rank]
        self._got = [min(max(0, count), own) for count in told.tolist()]
        if self._got != told.tolist():
            self._fault = CommunicatorError(f"{self._name}: ranks tell of {told.tolist()} rows of {own}")
        sent = [encode_rows(self._places[piece], self._lengths[to]) for to, piece in self._others()]
        received = [0 if rank == self._comm.rank else set_words(count, own) for rank, count in enumerate(self._got)]
        self._handles = [self._alltoall(sent, received, "numbers of rows")]

    def push_values(self) -> None:
        """Send every owner the values of its rows."""
        sent = [_message(self._values[piece], self._code) for _, piece in self._others()]
        received = [
            0 if rank == self._comm.rank else row_units(count, self._values.shape[1], self._code)
            for rank, count in enumerate(self._got)
        ]
        self._handles.append(self._alltoall(sent, received, "rows"))

    def tell(self) -> None:
        """Sum this rank's own rows, and tell all ranks how many they are."""
        places, values = (handle.wait() for handle in self._handles)
        try:
            self._sums = sum_rows(*self._lists(places, values), self._values)
        except CommunicatorError as error:
            self._fault = error
        number = self._sums[0].numel() if self._fault is None else DAMAGED
        told = torch.tensor([number], dtype=torch.int32, device=self._values.device)
        self._handles = [self._comm.allgather(told, name=f"{self._name}: numbers of sums")]

    def gather_sets(self) -> None:
        """Send all ranks the numbers of this rank's own rows.

        Raises:
            CommunicatorError: what came to some rank was damaged; on all ranks.
        """
        self._counts = self._handles[0].wait().tolist()
        if self._fault is not None:
            raise self._fault
        wrong = [rank for rank, n in enumerate(self._counts) if not 0 <= n <= self._lengths[rank]]
        if wrong:
            raise CommunicatorError(f"{self._name}: ranks {wrong} cannot go on; the error there says why")
        name = f"{self._name}: numbers of sums' rows"
        self._handles = []
        self._sets = RowSets(self._comm, self._sums[0], self._counts, self._lengths, name=name)

    def gather_values(self) -> None:
        """Send all ranks the sums of this rank's own rows."""
        name = f"{self._name}: sums"
        self._gathered = GatheredRows(self._comm, self._sums[1], self._counts, self._code, name=name)

    def wait(self) -> TableRows:
        """All rows that some rank has, and their sums, the same bytes on every rank.

        Raises:
            CommunicatorError: a message is damaged; on all ranks.
        """
        places, sums = self._sets.wait(), self._gathered.wait()
        rows = torch.cat([place * self._comm.size + owner for owner, place in enumerate(places)])
        ascending, order = torch.sort(rows)
        return ascending, torch.cat(sums)[order]

    def drain(self) -> None:
        """After all messages were started: wait for the last and forget them."""
        self._sets.drain()
        self._gathered.drain()

    def _others(self) -> list[tuple[int, Tensor]]:
        """The pieces of the other ranks; an empty one where this rank's own would be, which is not sent."""
        nothing = self._pieces[0][:0]
        return [(to, nothing if to == self._comm.rank else piece) for to, piece in enumerate(self._pieces)]

    def _alltoall(self, sent: Sequence[Tensor], received: Sequence[int], what: str) -> Handle:
        splits = [len(piece) for piece in sent]
        return self._comm.alltoall(
            torch.cat(list(sent)), splits=splits, received=received, name=f"{self._name}: {what}"
        )

    def _lists(self, places: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What each rank has of this rank's own rows."""
        rank, own = self._comm.rank, self._lengths[self._comm.rank]
        counts = [0 if other == rank else count for other, count in enumerate(self._got)]
        width = self._values.shape[1]
        place_parts = torch.split(places, [set_words(count, own) for count in counts])
        value_parts = torch.split(values, [row_units(count, width, self._code) for count in counts])
        sets, rows = [], []
        for other, count in enumerate(counts):
            name = f"{self._name} from rank {other}"
            sets.append(decode_rows(place_parts[other], count, own, name))
            rows.append(_values(value_parts[other], count, self._values, self._code, name))
        sets[rank], rows[rank] = self._places[self._pieces[rank]], self._values[self._pieces[rank]]
        return sets, rows


def sum_rows(sets: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> TableRows:
    """The union of the sets, and for each of its rows the sum of the values, added in the order given.

    Args:
        sets: int64, each ascending.
        values: one row for each row of the set.
        like: a tensor of the width, dtype and device of the values.
    """
    union, places = torch.unique(torch.cat(list(sets)), return_inverse=True)
    sums = like.new_zeros(union.numel(), like.shape[1])
    for place, part in zip(torch.split(places, [len(each) for each in sets]), values, strict=True):
        sums.index_add_(0, place, part)
    return union, sums


def spread(rows: Tensor, values: Tensor, among: Tensor | int) -> Tensor:
    """The values in a table of more rows, zero elsewhere.

    Args:
        rows: int64, ascending.
        values: one row for each, shape ``(count, width)``.
        among: the numbers of the table's rows, int64, ascending, all of ``rows`` among them; or how many it has.
    """
    places = rows if isinstance(among, int) else torch.searchsorted(among, rows)
    table = values.new_zeros(among if isinstance(among, int) else among.numel(), values.shape[1])
    return table.index_copy_(0, places, values)


def row_units(count: int, width: int, code: ValueCode | None) -> int:
    """Length of the message of ``count`` rows: in rows, or in bytes where they are coded."""
    return count if code is None or not count else code.size(count * width)


def _message(values: Tensor, code: ValueCode | None) -> Tensor:
    if code is None:
        return values
    flat = values.reshape(-1)
    # What rounding drops is lost: rows are not kept from step to step.
    coded = code.encode(flat, torch.empty_like(flat)) if len(flat) else torch.empty(0, dtype=torch.uint8, device="cpu")
    return to_device(coded, values.device)


def _values(part: Tensor, count: int, like: Tensor, code: ValueCode | None, name: str) -> Tensor:
    if code is None:
        return part
    values = like.new_empty(count, like.shape[1])
    if count:
        code.decode(part, values.view(-1), name=name)
    return values
