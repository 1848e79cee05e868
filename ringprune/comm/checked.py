"""The part that every communicator shares: arguments are checked and bytes counted here, once per call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.communicator import CPU, Ability, Handle, Nodes, Traffic
from ringprune.comm.host import host_number
from ringprune.comm.waiting import FinishedHandle
from ringprune.errors import ArgumentTypeError, ConfigurationError, UsageError

__all__ = ["AloneCommunicator", "CheckedCommunicator"]


class CheckedCommunicator(ABC):
    """A communicator whose subclasses only say how a collective starts.

    Calls with wrong arguments raise before anything is sent: ``ConfigurationError`` for values,
    ``ArgumentTypeError`` for types, ``UsageError`` after ``close()``.
    """

    kind: str
    abilities: frozenset[Ability]
    threads = True

    @staticmethod
    def start() -> Callable[[], None]:
        """Start the library, unless it is; returns what stops it again. MPI has been since its import."""
        return lambda: None

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic(size)
        self._closed = False
        self._divided: list[CheckedCommunicator] = []

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Handle:
        """Overwrite ``tensor`` on every rank with the one on rank ``root``; the handle returns ``tensor``."""
        self._check_tensor("broadcast", name, tensor)
        if not 0 <= root < self.size:
            raise ConfigurationError(f'broadcast "{name}": root is {root}; allowed are 0 to {self.size - 1}')
        call = Call("broadcast", name, tensor.dtype, tuple(tensor.shape), root=root)
        self._check_support(call, tensor)
        self.traffic.count_broadcast(tensor.nbytes)
        return self._start(call, tensor, tensor)

    def allreduce(self, tensor: Tensor, *, name: str) -> Handle:
        """Overwrite ``tensor`` with the ranks' sum, the same bytes everywhere; the handle returns ``tensor``."""
        self._check_tensor("allreduce", name, tensor)
        call = Call("allreduce", name, tensor.dtype, tuple(tensor.shape))
        self._check_support(call, tensor)
        self.traffic.count_allreduce(tensor.nbytes)
        return self._start(call, tensor, tensor)

    def allreduce_group(self, tensors: Sequence[Tensor], *, factor: float = 1.0, name: str) -> Handle:
        """Overwrite each of ``tensors`` with the ranks' sum times ``factor``; the handle returns the first."""
        if "group" not in self.abilities:
            raise ConfigurationError(
                f'allreduce_group "{name}": the {self.kind} communicator sums single tensors; "horovod" takes groups'
            )
        if not tensors:
            raise ConfigurationError(f'allreduce_group "{name}": no tensors')
        for tensor in tensors:
            self._check_tensor("allreduce", name, tensor)
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) > 1:
            raise ConfigurationError(f'allreduce_group "{name}": the tensors are of several dtypes or devices')
        call = Call("allreduce", name, tensors[0].dtype, (sum(tensor.numel() for tensor in tensors),))
        self._check_support(call, tensors[0])
        self.traffic.count_allreduce(sum(tensor.nbytes for tensor in tensors))
        return self._start_group(call, tensors, factor)

    def allgather(self, tensor: Tensor, *, sizes: Sequence[int] | None = None, name: str) -> Handle:
        """Concatenate the ranks' tensors along dimension 0 in rank order; the handle returns a new tensor.

        Args:
            tensor: shape ``(n, ...)``; all but the first dimension are equal on all ranks.
            sizes: first dimension on each rank, where they differ; None where all are equal.
            name: what errors call this collective.
        """
        self._check_tensor("allgather", name, tensor, rows=True)
        rows = (tensor.shape[0],) * self.size if sizes is None else self._rows("allgather", name, "sizes", sizes)
        if rows[self.rank] != tensor.shape[0]:
            raise ConfigurationError(
                f'allgather "{name}": sizes[{self.rank}] is {rows[self.rank]}, but this rank has {tensor.shape[0]} rows'
            )
        call = Call("allgather", name, tensor.dtype, tuple(tensor.shape), sizes=rows)
        self._check_support(call, tensor)
        self.traffic.count_allgather(sum(rows) * call.row_numel * tensor.element_size())
        return self._start(call, tensor, call.new_result(tensor))

    def alltoall(
        self,
        tensor: Tensor,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        name: str,
    ) -> Handle:
        """Send the j-th piece of ``tensor`` to rank j; the handle returns the pieces received, in rank order.

        Args:
            tensor: shape ``(n, ...)``.
            splits: rows for each rank, summing to n; None divides n evenly.
            received: rows coming from each rank; None where that is n divided evenly.
            name: what errors call this collective.
        """
        self._check_tensor("alltoall", name, tensor, rows=True)
        sent = self._rows("alltoall", name, "splits", self._evenly(name, tensor) if splits is None else splits)
        got = self._rows("alltoall", name, "received", self._evenly(name, tensor) if received is None else received)
        if sum(sent) != tensor.shape[0]:
            raise ConfigurationError(f'alltoall "{name}": splits sum to {sum(sent)}, rows are {tensor.shape[0]}')
        call = Call("alltoall", name, tensor.dtype, tuple(tensor.shape), splits=sent, received=got)
        self._check_support(call, tensor)
        to_others = sum(sent) - sent[self.rank]
        self.traffic.count_own(to_others * call.row_numel * tensor.element_size())
        return self._start(call, tensor, call.new_result(tensor))

    def shift(self, tensor: Tensor, into: Tensor, *, name: str) -> Handle:
        """Send ``tensor`` to rank + 1, receive ``into`` from rank - 1 (mod size); the handle returns ``into``."""
        if "shift" not in self.abilities:
            raise ConfigurationError(
                f'shift "{name}": the {self.kind} communicator cannot shift; "mpi" and "torch" can'
            )
        self._check_tensor("shift", name, tensor)
        self._check_tensor("shift", name, into)
        alike = (into.shape, into.dtype, into.device) == (tensor.shape, tensor.dtype, tensor.device)
        if not alike or into.data_ptr() == tensor.data_ptr() != 0:
            raise ConfigurationError(f'shift "{name}": into must be another tensor of the same shape, dtype and device')
        call = Call("shift", name, tensor.dtype, tuple(tensor.shape))
        self._check_support(call, tensor)
        self.traffic.count_own(tensor.nbytes if self.size > 1 else 0)
        return self._start(call, tensor, into)

    def progress(self) -> None:  # noqa: B027 - most need no calls
        """Nothing: most libraries move their messages in threads of their own."""

    def barrier(self, *, name: str) -> None:
        """Return once all ranks have called this; ranks in another collective are waited for."""
        token = torch.zeros(1, dtype=torch.int32, device=CPU)
        self._check_tensor("barrier", name, token)
        if self.size > 1:
            self._meet(Call("barrier", name, token.dtype, tuple(token.shape)), token)

    def divide(self, device: torch.device = CPU) -> Nodes:
        """Communicators of the ranks of each node, and of the nodes' first ranks; all ranks call this.

        Args:
            device: where this communicator carries tensors.
        """
        own = torch.tensor([self._host()], dtype=torch.int64, device=device)
        nodes: dict[int, list[int]] = {}
        for rank, host in enumerate(self.allgather(own, name="hosts").wait().tolist()):
            nodes.setdefault(host, []).append(rank)
        firsts = [ranks[0] for ranks in nodes.values()]
        local, across = self._part([*nodes.values()]), self._part([firsts])
        assert local is not None, "every rank is on a node"
        return Nodes(local, across, len(nodes))

    def _part(self, parts: Sequence[Sequence[int]]) -> "CheckedCommunicator | None":
        """A communicator of that one of ``parts`` which holds this rank, None where there is none."""
        several = [part for part in parts if len(part) > 1]
        made = self._make_parts(several) if several else None
        if made is None and any(self.rank in part for part in parts):
            made = AloneCommunicator(self.kind, self.abilities)
        if made is not None:
            self._divided = [*(part for part in self._divided if not part._closed), made]
        return made

    def duplicate(self) -> "CheckedCommunicator":
        """Another communicator of the same ranks, whose messages do not meet those of this one; all ranks call this."""
        made = self._duplicate()
        self._divided = [*(part for part in self._divided if not part._closed), made]
        return made

    def close(self) -> None:
        """Give back what the communicator holds, and what it was divided into; a second call does nothing."""
        if not self._closed:
            self._closed = True
            for part in self._divided:
                part.close()
            self._release()

    def leave(self) -> None:
        """Close, as far as one rank can alone; the rest ends with the process."""
        for part in self._divided:
            part.leave()

    @abstractmethod
    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        """Start the collective on ``tensor``, to end in ``into`` (``tensor`` itself where it works in place)."""

    def _start_group(self, call: Call, tensors: Sequence[Tensor], factor: float) -> Handle:
        """Start the sum of each of ``tensors``, in place; of those with the ability."""
        raise AssertionError(f'{type(self).__name__} names the ability "group", and sums no groups')

    def _meet(self, call: Call, token: Tensor) -> None:
        """Wait for all ranks; a library that tells collectives apart by their names needs no more than one of them."""
        self.allgather(token, name=call.name).wait()

    @abstractmethod
    def _check_support(self, call: Call, tensor: Tensor) -> None:
        """Raise ConfigurationError for a dtype, device or length that this communicator cannot carry."""

    @abstractmethod
    def _make_parts(self, parts: Sequence[Sequence[int]]) -> "CheckedCommunicator | None":
        """Make a communicator of each of ``parts``: disjoint sets of two or more ranks, the same on all ranks.

        Returns:
            The one that holds this rank.
        """

    @abstractmethod
    def _duplicate(self) -> "CheckedCommunicator":
        """Make another one of all ranks."""

    def _host(self) -> int:
        """A number that just the ranks on this host have; all ranks call this."""
        return host_number()

    def _spreads(self, call: Call, least: int) -> bool:
        """Whether an allgather of ``least`` bytes or more had better be an alltoall; the same on all ranks.

        Every rank then hands its rows to all others itself. Each sends as many bytes; Open MPI's own allgathers take
        longer for it (docs/benchmarks.md).
        """
        return self.size > 2 and call.largest_count * call.dtype.itemsize >= least

    def _release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the library holds for this communicator."""

    def _check_tensor(self, op: Ability, name: str, tensor: Tensor, *, rows: bool = False) -> None:
        if self._closed:
            raise UsageError(f'{op} "{name}": this communicator has been closed')
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f'{op} "{name}": expected a tensor, got {type(tensor).__name__}')
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ConfigurationError(f'{op} "{name}": the tensor must be dense and contiguous')
        if rows and tensor.dim() == 0:
            raise ConfigurationError(f'{op} "{name}": the tensor needs a first dimension, it has none')

    def _rows(self, op: Ability, name: str, argument: str, rows: Sequence[int]) -> tuple[int, ...]:
        checked = tuple(int(n) for n in rows)
        if len(checked) != self.size or min(checked) < 0:
            raise ConfigurationError(
                f'{op} "{name}": {argument} is {list(checked)}; it needs {self.size} numbers of rows, 0 or more'
            )
        return checked

    def _evenly(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        rows, rest = divmod(tensor.shape[0], self.size)
        if rest:
            raise ConfigurationError(
                f'alltoall "{name}": {tensor.shape[0]} rows do not divide over {self.size} ranks; '
                "give splits and received"
            )
        return (rows,) * self.size


class AloneCommunicator(CheckedCommunicator):
    """A rank alone, for example on its node: needs no library.

    Args:
        kind: of the communicator that it is a part of.
        abilities: of the same.
    """

    def __init__(self, kind: str, abilities: frozenset[Ability]) -> None:
        super().__init__(0, 1)
        self.kind, self.abilities = kind, abilities

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        if into is not tensor:
            into.copy_(tensor.detach())
        return FinishedHandle(into)

    def _start_group(self, call: Call, tensors: Sequence[Tensor], factor: float) -> Handle:
        for tensor in tensors:
            tensor.detach().mul_(factor)
        return FinishedHandle(tensors[0])

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        """Nothing is sent, so everything can be carried."""

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> CheckedCommunicator | None:
        raise AssertionError("one rank has no parts of two or more")

    def _duplicate(self) -> "AloneCommunicator":
        return AloneCommunicator(self.kind, self.abilities)
