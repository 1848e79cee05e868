"""Rows in a hierarchy: a node's ranks ask for what they want together, and sum their gradients, before anything leaves.

Parallax's local aggregation (Kim et al., EuroSys 2019, section 4.3): rows that several ranks of a node use travel once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringprune.comm.communicator import Communicator, Nodes
from ringprune.sharding.fetching import Request, RowMessages, arrived, message_of, refused

__all__ = ["NodeMessages", "NodeRequest"]


@dataclass(frozen=True)
class NodeRequest:
    """The rows that a node's ranks have asked for.

    Attributes:
        count: how many different ones.
        own: int64, where those of this rank stand among them.
        across: what all nodes have asked for; None on ranks that are not the first of their node.
    """

    count: int
    own: Tensor
    across: Request | None


class NodeMessages:
    """One table's messages, where the first ranks of nodes own its rows; all ranks make each call together.

    Args:
        comm: all ranks.
        nodes: the same, divided by node.
        across: the table's messages between the first ranks; None on all others.
        dtype: in which rows travel between these.
        name: what errors call the table.
    """

    def __init__(
        self, comm: Communicator, nodes: Nodes, across: RowMessages | None, dtype: torch.dtype, name: str
    ) -> None:
        self._comm, self._local, self._across, self._name = comm, nodes.local, across, name
        self._dtype = arrived(dtype)
        self._share = nodes.count / comm.size  # a node's sums are sent as large as a rank's gradients

    def ask(self, rows: Tensor, problem: str | None = None) -> NodeRequest:
        """As :meth:`RowMessages.ask`; whether a rank has a problem takes a message of its own.

        Raises:
            IndexRangeError: on all ranks, where one has; nothing else was sent.
        """
        flag = torch.tensor([problem is not None], dtype=torch.int32, device=rows.device)
        if int(self._comm.allreduce(flag, name=f"{self._name}, problems").wait()):
            raise refused(problem, self._comm, rows.device, self._name)
        length = torch.tensor([len(rows)], device=rows.device)
        sizes = self._local.allgather(length, name=f"{self._name}, counts in the node").wait().tolist()
        wanted = self._local.allgather(rows, sizes=sizes, name=f"{self._name}, which rows of the node").wait()
        union = torch.unique(wanted)
        across = None if self._across is None else self._across.ask(union)
        return NodeRequest(len(union), torch.searchsorted(union, rows), across)

    def pull(self, request: NodeRequest, own: Tensor) -> Tensor:
        """As :meth:`RowMessages.pull`."""
        if self._across is not None and request.across is not None:
            rows = self._across.pull(request.across, own)
        else:
            rows = own.new_empty(request.count, *own.shape[1:], dtype=self._dtype)
        rows = self._local.broadcast(rows, 0, name=f"{self._name}, rows in the node").wait()
        return rows.index_select(0, request.own)

    def push(self, request: NodeRequest, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`RowMessages.push`, of sums over each node; nothing but on the first rank of each."""
        summed = gradients.new_zeros(request.count, *gradients.shape[1:]).index_copy_(0, request.own, gradients)
        summed = self._local.allreduce(summed, name=f"{self._name}, gradients in the node").wait()
        if self._across is None or request.across is None:
            return request.own[:0], summed[:0]
        positions, found = self._across.push(request.across, summed.mul_(self._share))
        return positions, found.mul_(1 / self._share)

    def table(self, own: Tensor) -> Tensor:
        """As :meth:`RowMessages.table`."""
        count = torch.zeros(1, dtype=torch.int64, device=own.device)
        found = None
        if self._across is not None:
            found = self._across.table(own)
            count.fill_(len(found))
        length = int(self._local.broadcast(count, 0, name=f"{self._name}, rows of the table").wait())
        whole = own.new_empty(length, *own.shape[1:]) if found is None else found
        sent = self._local.broadcast(message_of(whole), 0, name=f"{self._name}, table in the node").wait()
        return sent.view(own.dtype)
