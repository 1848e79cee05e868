"""Rows travel from their owners to the ranks that look them up, and their gradients back."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator
from ringprune.errors import IndexRangeError
from ringprune.plan import gather_texts
from ringprune.rank_words import by_rank
from ringprune.sharding.owners import Owners

__all__ = ["Request", "RowMessages", "RowValues", "dtype_of", "message_of", "refused"]

RowValues = Literal["fp32", "fp16", "bf16"]

SIXTEEN = {"fp16": torch.float16, "bf16": torch.bfloat16}

REFUSED = -1
"""Instead of a count: this rank cannot ask for anything, since what it was given is wrong."""


@dataclass(frozen=True)
class Request:
    """The rows that all ranks have asked for, seen from one of them.

    Attributes:
        order: int64, where each row that was asked for stands among ``rows`` given: sorted by owner.
        asked: how many rows this rank gets from each rank.
        served: how many rows it gives to each.
        positions: int64, which of its own rows those are, in the order of the ranks.
    """

    order: Tensor
    asked: list[int]
    served: list[int]
    positions: Tensor


class RowMessages:
    """One table's messages; all ranks make each call together.

    A pull is three: how many rows, which, and the rows. A push is one, since owners know what they gave.

    Args:
        comm: with whom; nothing else uses it at the same time.
        owners: who owns what.
        dtype: in which rows and gradients travel; they come as float32 where it has 16 bits, to be added in that.
        name: what errors call the table.
    """

    def __init__(self, comm: Communicator, owners: Owners, dtype: torch.dtype, name: str) -> None:
        self._comm, self._owners, self._dtype, self._name = comm, owners, dtype, name

    def ask(self, rows: Tensor, problem: str | None = None) -> Request:
        """Tell the owners which rows this rank wants.

        Args:
            rows: int64, each row once.
            problem: why this rank cannot ask, if it cannot; the other ranks then hear of it.

        Raises:
            IndexRangeError: on all ranks, where one has a problem; nothing else was sent.
        """
        comm, device = self._comm, rows.device
        owner = self._owners.rank_of(rows)
        asked = torch.bincount(owner, minlength=comm.size)
        message = torch.full_like(asked, REFUSED) if problem else asked
        served = comm.alltoall(message, name=f"{self._name}, counts of rows").wait().tolist()
        if REFUSED in served:
            raise refused(problem, comm, device, self._name)
        order = owner.argsort(stable=True)
        counts = asked.tolist()
        wanted = self._owners.position_of(rows[order])
        if self._owners.rows < 2**31:
            wanted = wanted.int()
        positions = comm.alltoall(wanted, splits=counts, received=served, name=f"{self._name}, which rows").wait()
        return Request(order, counts, served, positions.long())

    def pull(self, request: Request, own: Tensor) -> Tensor:
        """The rows that this rank has asked for.

        Args:
            request: what all ranks have asked for.
            own: shape ``(rows of this rank, dim)``, what this rank owns.

        Returns:
            Shape ``(rows asked for, dim)``, in the order in which they were asked for.
        """
        given = own.index_select(0, request.positions)
        got = self._travel(given, request.served, request.asked, "rows")
        return torch.empty_like(got).index_copy_(0, request.order, got)

    def push(self, request: Request, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the rows that this rank gave, one for each rank that used a row.

        Args:
            request: what all ranks have asked for.
            gradients: shape ``(rows asked for, dim)``, of what :meth:`pull` returned.

        Returns:
            Which of its own rows, int64, and their gradients, shape ``(rows given, dim)``; a row that several ranks
            used is there several times, in the order of the ranks.
        """
        given = gradients.index_select(0, request.order)
        return request.positions, self._travel(given, request.asked, request.served, "gradients")

    def table(self, own: Tensor) -> Tensor:
        """What all ranks keep of their rows, in the order of the table.

        Args:
            own: shape ``(rows of this rank, ...)``, one entry for each.
        """
        comm, owners = self._comm, self._owners
        sizes = [owners.count_of(rank) for rank in range(comm.size)]
        found = comm.allgather(message_of(own), sizes=sizes, name=f"{self._name}, table")
        order = torch.cat([owners.rows_of(rank) for rank in range(comm.size)]).to(own.device)
        rows = found.wait().view(own.dtype)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _travel(self, tensor: Tensor, splits: list[int], received: list[int], what: str) -> Tensor:
        message = message_of(tensor.to(self._dtype))
        name = f"{self._name}, {what}"
        got = self._comm.alltoall(message, splits=splits, received=received, name=name).wait().view(self._dtype)
        return got.to(arrived(self._dtype))


def arrived(dtype: torch.dtype) -> torch.dtype:
    """In which dtype rows are that have travelled in ``dtype``: wide enough to be added."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def message_of(tensor: Tensor) -> Tensor:
    """The tensor as every library sends it: not all know 16-bit floating point, all know integers."""
    return (tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor).contiguous()


def dtype_of(values: RowValues, own: torch.dtype) -> torch.dtype:
    """In which dtype rows of dtype ``own`` travel."""
    return SIXTEEN.get(values, own) if own.itemsize > 2 else own


def refused(problem: str | None, comm: Communicator, device: torch.device, name: str) -> IndexRangeError:
    """The error for all ranks, of which one has a problem; all of them call this."""
    texts = gather_texts(problem or "", comm, device, name=f"{name}, what was wrong")
    return IndexRangeError(by_rank(texts))
