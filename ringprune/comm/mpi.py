"""Collectives over MPI, on a duplicate of a communicator, with MPI's own non-blocking calls.

The one file that imports mpi4py. The import starts MPI unless something else has.
"""

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from mpi4py import MPI
from torch import Tensor

from ringprune.comm.call import LARGEST_COUNT, Call
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import Ability, Handle
from ringprune.comm.staging import CudaCopies, Staging
from ringprune.comm.waiting import FinishedHandle, Waiter
from ringprune.errors import ConfigurationError
from ringprune.validation import flag

__all__ = ["MpiCommunicator"]

LAST_SECONDS = 5.0  # for what is still under way at the end of the program
# MPI makes progress while it is asked, so pauses are short; and yet there are some: a rank that keeps asking is short
# of processor time when its message comes, where others want the core too.
EAGER_SECONDS = 5e-4
LONGEST_PAUSE = 2e-4

# Open MPI's non-blocking allreduce is a ring only from here on, and only out of place; in place it is binomial trees:
# the whole buffer, 2 log2(P) times one after the other. That is worth a copy of it.
RING_RANKS = 4
RING_BYTES = 1 << 16

SPREAD_BYTES = 1 << 20
"""Of an allgather that is made as an alltoall."""

SUMMED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}
# What is only moved travels as integers of its width, so every dtype can be.
MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


class _Duplicate:
    """A duplicate that a communicator works on, and others after it.

    None is freed: MPI does that on all ranks together, while a wrapper is closed by one rank, or collected by Python.
    Nor would that be safe at a program's end: Horovod, where it has started MPI, shuts it down from a thread of its own
    as soon as any rank's program ends, and a rank that is in a call of MPI at that moment crashes.

    Args:
        mpi: the duplicate.
        number: of all that a rank has another one each; the same on all ranks of this one.

    Attributes:
        started: how many collectives were.
        waiter: waits for them, and holds what MPI reads and writes meanwhile.
        left: nobody works on it.
    """

    def __init__(self, mpi: MPI.Comm, number: int) -> None:
        self.mpi, self.number, self.started, self.left = mpi, number, 0, False
        self.waiter: Waiter | None = None

    def leave(self) -> None:
        """Nobody works on it any more, on this rank."""
        self.left = True

    def serves(self, original: MPI.Comm) -> bool:
        """Whether it may serve as one of ``original``, as far as this rank knows."""
        over = self.left and (self.waiter is None or self.waiter.has_ended_well())
        return over and MPI.Comm.Compare(self.mpi, original) == MPI.CONGRUENT


_duplicates: list[_Duplicate] = []


def _duplicate_of(original: MPI.Comm) -> _Duplicate:
    """One that nobody works on any more on any rank, or a new one; all ranks call this."""
    spare = {each.number: each for each in _duplicates if each.serves(original)}
    highest = _duplicates[-1].number if _duplicates else 0
    told = original.allgather((highest, {number: each.started for number, each in spare.items()}))
    # One on which a rank has started more than another may have a message left over.
    common = set.intersection(*(set(started.items()) for _, started in told))
    if common:
        number, _ = min(common)
        spare[number].left = False
        return spare[number]
    _duplicates.append(_Duplicate(original.Dup(), 1 + max(number for number, _ in told)))
    return _duplicates[-1]


@atexit.register  # mpi4py shuts MPI down later, at its own exit
def _let_all_end() -> None:
    for each in _duplicates:
        _let_end(each.waiter)


def _let_end(waiter: Waiter | None) -> None:
    """Let what is under way end: MPI must not be shut down, nor memory be given back, in the middle of it."""
    if waiter is not None and not MPI.Is_finalized():
        waiter.finish_all(LAST_SECONDS)


class MpiCommunicator(CheckedCommunicator):
    """All ranks of an MPI communicator; tensors in CPU memory, those of GPUs copied there and back (staging.py).

    Args:
        communicator: an ``mpi4py.MPI.Comm`` to duplicate; None is ``COMM_WORLD``. Making the duplicate is collective;
            one that was made of the same ranks before, and is in use no more, serves again.
        timeout: seconds that a rank may wait in one collective; None is no limit.
        cuda_aware: this MPI takes addresses in the memory of GPUs: hand it those instead of copies. An MPI that cannot
            ends the process on them, so nobody guesses it.
    """

    kind = "mpi"
    abilities: frozenset[Ability] = frozenset({"broadcast", "allreduce", "allgather", "alltoall", "shift", "divide"})

    def __init__(
        self, communicator: MPI.Comm | None = None, timeout: float | None = None, cuda_aware: bool = False
    ) -> None:
        original = MPI.COMM_WORLD if communicator is None else communicator
        if original == MPI.COMM_NULL:
            raise ConfigurationError('connect("mpi"): this rank is not part of the communicator given')
        # On a duplicate our messages cannot meet those of the script or of another library.
        self._own = _duplicate_of(original)
        self._mpi = self._own.mpi
        self._mpi.Set_errhandler(MPI.ERRORS_RETURN)
        super().__init__(self._mpi.Get_rank(), self._mpi.Get_size())
        self._waiter = self._own.waiter = Waiter(self.rank, timeout, EAGER_SECONDS, (MPI.Exception,), LONGEST_PAUSE)
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE  # others may call MPI from theirs
        self._cuda_aware = flag("cuda_aware", cuda_aware)
        self._staging = Staging(self._request, CudaCopies())
        # Calls it once, whether this is closed first or collected: later another may work on the duplicate.
        self._leave_own = weakref.finalize(self, self._own.leave)
        self._leave_own.atexit = False
        _abort_after_uncaught_errors()

    def _meet(self, call: Call, token: Tensor) -> None:
        """By messages from rank to rank, which meet no collective."""
        for _ in range(self.size - 1):  # after n of them the n ranks before this one are known to have come
            self.traffic.count_own(token.nbytes)
            self._start(call, token, torch.empty_like(token)).wait()

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        if self.size == 1:
            if into is not tensor:
                into.copy_(tensor.detach())
            return FinishedHandle(into)
        try:
            copied = self._is_copied(tensor)
            if not copied and call.op == "allreduce" and self.size >= RING_RANKS and tensor.nbytes >= RING_BYTES:
                tensor = tensor.detach().clone()
            if copied or self._staging.waiting:
                receives = call.op == "broadcast" and call.root != self.rank
                staged = self._staging.add(call, tensor, into, copied=copied, receives=receives)
                return self._waiter.handle(call, done=staged.done, result=staged.result, kept=tensor)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows no streams
            requests = self._request(call, tensor, into)
        except MPI.Exception as error:
            raise self._waiter.failed(call, error) from error
        return self._waiter.handle(
            call, done=lambda: all(request.Test() for request in requests), result=lambda: into, kept=tensor
        )

    def progress(self) -> None:
        """Ask for the first collective that is not over: MPI moves all of them meanwhile."""
        self._waiter.busy()

    def _is_copied(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu" and not self._cuda_aware

    def _request(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        starters: dict[Ability, Callable[[Call, Tensor, Tensor], list[MPI.Request]]] = {
            "broadcast": self._broadcast,
            "allreduce": self._allreduce,
            "allgather": self._allgather,
            "alltoall": self._alltoall,
            "shift": self._shift,
            "barrier": self._shift,
        }
        requests = starters[call.op](call, tensor, into)
        self._own.started += 1
        return requests

    def _broadcast(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        return [self._mpi.Ibcast(_moved(tensor), root=call.root or 0)]

    def _allreduce(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        kind = SUMMED[into.dtype]
        own = MPI.IN_PLACE if tensor is into else [_memory(tensor), tensor.numel(), kind]
        return [self._mpi.Iallreduce(own, [_memory(into), into.numel(), kind], op=MPI.SUM)]

    def _allgather(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        received = _pieces(into, call.sizes, call)
        if self._spreads(call, SPREAD_BYTES):
            memory, numel, kind = _moved(tensor)
            return [self._mpi.Ialltoallv((memory, [numel] * self.size, [0] * self.size, kind), received)]
        return [self._mpi.Iallgatherv(_moved(tensor), received)]

    def _alltoall(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        return [self._mpi.Ialltoallv(_pieces(tensor, call.splits, call), _pieces(into, call.received, call))]

    def _shift(self, call: Call, tensor: Tensor, into: Tensor) -> list[MPI.Request]:
        tag = int(call.op == "barrier")
        received = self._mpi.Irecv(_moved(into), source=(self.rank - 1) % self.size, tag=tag)
        return [received, self._mpi.Isend(_moved(tensor), dest=(self.rank + 1) % self.size, tag=tag)]

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(
                f"{call}: the tensor is on {tensor.device}; the mpi communicator sends memory of the CPU and of GPUs"
            )
        if tensor.is_cuda and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ConfigurationError(
                f"{call}: MPI was started for one thread, and gradients of GPUs come in one of torch's: start it with "
                "MPI_THREAD_SERIALIZED or more, as mpi4py does unless mpi4py.rc says otherwise"
            )
        if call.op == "allreduce" and call.dtype not in SUMMED:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ConfigurationError(f"{call}: MPI cannot sum this dtype; convert it to one of {known}")
        if call.largest_count > LARGEST_COUNT:
            raise ConfigurationError(
                f"{call}: {call.largest_count} elements; MPI takes at most {LARGEST_COUNT} in one call: split it"
            )

    @staticmethod
    def leaves_out(communicator: MPI.Comm) -> bool:
        """Whether this rank is outside: MPI then has no communicator for it."""
        return bool(communicator == MPI.COMM_NULL)

    def _host(self) -> int:
        self._staging.start_all()
        shared = self._mpi.Split_type(MPI.COMM_TYPE_SHARED)  # MPI's own idea of a node: shared memory
        number = shared.allreduce(self.rank, op=MPI.MIN)
        shared.Free()
        return int(number)

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> "MpiCommunicator | None":
        colour = next((number for number, part in enumerate(parts) if self.rank in part), MPI.UNDEFINED)
        self._staging.start_all()
        split = self._mpi.Split(colour, self.rank)
        if split == MPI.COMM_NULL:
            return None
        part = MpiCommunicator(split, self._waiter.timeout, self._cuda_aware)
        split.Free()  # it works on a duplicate
        return part

    def _duplicate(self) -> "MpiCommunicator":
        self._staging.start_all()
        return MpiCommunicator(self._mpi, self._waiter.timeout, self._cuda_aware)

    def _release(self) -> None:
        _let_end(self._waiter)
        self.leave()

    def leave(self) -> None:
        """Close: the next communicator of the same ranks may have the duplicate, once all of them have left it."""
        super().leave()
        self._closed = True
        self._leave_own()


def _memory(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _moved(tensor: Tensor) -> tuple[MPI.buffer, int, MPI.Datatype]:
    return _memory(tensor), tensor.numel(), MOVED[tensor.element_size()]


def _pieces(
    tensor: Tensor, rows: tuple[int, ...] | None, call: Call
) -> tuple[MPI.buffer, list[int], list[int], MPI.Datatype]:
    counts = [n * call.row_numel for n in rows or ()]
    return _memory(tensor), counts, [0, *accumulate(counts[:-1])], MOVED[tensor.element_size()]


def _abort_after_uncaught_errors() -> None:
    """End the whole job when this rank ends with an uncaught exception.

    MPI waits for all ranks when it is shut down: without this, a rank that raised would wait there for ranks that wait
    in a collective for it.
    """
    atexit.unregister(_abort_if_failed)
    atexit.register(_abort_if_failed)


def _abort_if_failed() -> None:
    if getattr(sys, "last_value", None) is not None and MPI.COMM_WORLD.Get_size() > 1 and not MPI.Is_finalized():
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
