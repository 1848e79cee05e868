"""Collectives over a process group of torch.distributed: Gloo for CPU memory, NCCL for GPUs.

The one file that imports torch.distributed.
"""

import atexit
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringprune.comm.call import Call
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import Ability, Handle
from ringprune.comm.waiting import FinishedHandle, Waiter
from ringprune.errors import ArgumentTypeError, ConfigurationError, DependencyError, UsageError

__all__ = ["TorchCommunicator"]

JOIN_SECONDS = 1.0
LET_GO_SECONDS, LAST_SECONDS = 0.05, 0.2
"""Gloo's thread may still want Python, to let go of the last message; ended from Python then, both wait for ever."""

EAGER_SECONDS = 0.0  # Gloo's threads need the core more than we do
LONGEST_STORE_PAUSE = 0.02  # one process answers all that ask
USUAL_LIMIT = timedelta(minutes=30)  # torch.distributed's own
SERVES = {"gloo": "cpu", "nccl": "cuda"}  # back ends that are known to do all that is asked of them, and where
# What is only moved travels as bytes, so every dtype can be. Gloo ends the process over a dtype that it cannot sum.
SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


class TorchCommunicator(CheckedCommunicator):
    """The ranks of a process group; tensors in the memory that its back end serves.

    torch.distributed matches collectives by their order. Without ``process_group`` a new group of all ranks is made,
    so that our collectives cannot be taken for the script's own; all ranks construct it together. It has Gloo where the
    script's has NCCL alone, too: what the host writes and reads waits for nothing that a GPU still has to do. A group
    that is given is used as it is: give one that nothing else uses (``dist.new_group(ranks, backend="gloo")``).

    Args:
        process_group: a ``torch.distributed.ProcessGroup`` that holds this rank; None is all ranks.
        timeout: seconds that a rank may wait in one collective; None is torch.distributed's own limit.

    Raises:
        UsageError: torch.distributed is not initialised.
        ConfigurationError: this rank is not in the group, its back end is neither Gloo nor NCCL, or one is given that
            serves GPUs alone.
    """

    kind = "torch"
    abilities: frozenset[Ability] = frozenset({"broadcast", "allreduce", "allgather", "alltoall", "shift", "divide"})

    def __init__(self, process_group: Any = None, timeout: float | None = None) -> None:
        original = _checked_group(process_group)
        self._own = original is dist.group.WORLD
        self._devices = serving(dist.get_backend_config(original), more=self._own)
        self._group: Any = _new_group(self._devices, timeout) if self._own else original
        super().__init__(dist.get_rank(self._group), dist.get_world_size(self._group))
        self._waiter = Waiter(self.rank, timeout, EAGER_SECONDS, (RuntimeError, ValueError))
        self._store_waiter = Waiter(self.rank, timeout, EAGER_SECONDS, (RuntimeError,), LONGEST_STORE_PAUSE)
        made = _made[self._group.group_name] = _made.get(self._group.group_name, 0) + 1
        self._label, self._barriers = f"{self._group.group_name}/{made}", 0  # the same on all ranks, and nobody else's
        self._messages = _Messages()
        _open.add(self)

    @staticmethod
    def start() -> Callable[[], None]:
        """Start torch.distributed with Gloo, where a launcher has said who is there."""
        if not dist.is_available() or dist.is_initialized() or "WORLD_SIZE" not in os.environ:
            return lambda: None  # connect() says what is missing
        dist.init_process_group("gloo")
        return dist.destroy_process_group

    def _meet(self, call: Call, token: Tensor) -> None:
        """The ranks are counted in the store where they have found each other; its bytes are not counted.

        Whatever the back end, that meets no collective. A message of Gloo's that is waited for when the process ends
        would abort it.
        """
        self._barriers += 1
        key = f"ringprune/{self._label}/{self._barriers}"
        try:
            store = dist.distributed_c10d._get_default_store()  # private to torch; a store of our own needs an address
            store.add(key, 1)
        except self._store_waiter.library_errors as error:
            raise self._store_waiter.failed(call, error) from error
        self._store_waiter.handle(
            call, done=lambda: store.add(key, 0) >= self.size, result=lambda: token, kept=None
        ).wait()

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        starters: dict[Ability, Callable[[Call, Tensor, Tensor], list[Any]]] = {
            "broadcast": self._broadcast,
            "allreduce": self._allreduce,
            "allgather": self._allgather,
            "alltoall": self._alltoall,
            "shift": self._shift,
        }
        if self.size == 1:
            if into is not tensor:
                into.copy_(tensor.detach())
            return FinishedHandle(into)
        try:
            works = starters[call.op](call, tensor.detach(), into.detach())
        except self._waiter.library_errors as error:
            raise self._waiter.failed(call, error) from error

        def result() -> Tensor:
            for work in works:
                work.wait()  # raises what went wrong; on a GPU it orders the current stream after the collective
            return into

        def done() -> bool:
            return all(work.is_completed() for work in works)

        return self._waiter.handle(call, done=done, result=result, kept=tensor)

    def _broadcast(self, call: Call, tensor: Tensor, into: Tensor) -> list[Any]:
        return [dist.broadcast(_moved(tensor), group_src=call.root, group=self._group, async_op=True)]

    def _allreduce(self, call: Call, tensor: Tensor, into: Tensor) -> list[Any]:
        return [dist.all_reduce(tensor, group=self._group, async_op=True)]

    def _allgather(self, call: Call, tensor: Tensor, into: Tensor) -> list[Any]:
        own, gathered = _moved(tensor), _moved(into)
        if len(set(call.sizes or ())) > 1:
            # Every rank sends its rows to every other: no padding, and as many bytes as a gather of rows of one length.
            copies, sent, received = (
                own.repeat(self.size),
                [own.numel()] * self.size,
                _bytes_of(call, call.sizes, tensor),
            )
            return [self._exchange(gathered, copies, received, sent)]
        # One function, renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(gathered, own, group=self._group, async_op=True)]

    def _alltoall(self, call: Call, tensor: Tensor, into: Tensor) -> list[Any]:
        sent, received = _bytes_of(call, call.splits, tensor), _bytes_of(call, call.received, tensor)
        return [self._exchange(_moved(into), _moved(tensor), received, sent)]

    def _exchange(self, into: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Any:
        return dist.all_to_all_single(into, tensor, received, sent, group=self._group, async_op=True)

    def _shift(self, call: Call, tensor: Tensor, into: Tensor) -> list[Any]:
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages = [
            dist.P2POp(dist.irecv, _moved(into), group=self._group, group_peer=previous),
            dist.P2POp(dist.isend, _moved(tensor), group=self._group, group_peer=following),
        ]
        works = dist.batch_isend_irecv(messages)
        return [self._messages.follow(works)] if self._devices[tensor.device.type] == "gloo" else works

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        if tensor.device.type not in self._devices:
            known = " and ".join(f"{device} ({name})" for device, name in self._devices.items())
            raise ConfigurationError(
                f"{call}: the tensor is on {tensor.device}; this process group serves {known}. Move the model, or "
                'call init_process_group("cpu:gloo,cuda:nccl") for both'
            )
        if call.op == "allreduce" and call.dtype not in SUMMED:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise ConfigurationError(f"{call}: torch.distributed cannot sum this dtype; convert it to one of {known}")

    @staticmethod
    def leaves_out(process_group: Any) -> bool:
        """Whether this rank is outside: torch.distributed then has no group for it."""
        return process_group == dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(process_group, dist.ProcessGroup) and dist.get_rank(process_group) < 0
        )

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> "TorchCommunicator | None":
        if [len(part) for part in parts] == [self.size]:
            # The whole group again. Collectives match by their order, which is the same for all ranks: it serves both.
            return TorchCommunicator(self._group, self._waiter.timeout)
        if self.size < dist.get_world_size():
            # Groups made by their members alone hang in torch 2.13 where ranks are in different numbers of groups.
            raise ConfigurationError(
                "a process group that leaves out ranks of the job cannot be divided by node: torch.distributed makes "
                "groups with all ranks only; connect to all of them, or use MPI"
            )
        ranks = dist.get_process_group_ranks(self._group)
        groups = [_new_group(self._devices, self._waiter.timeout, [ranks[rank] for rank in part]) for part in parts]
        own = next((number for number, part in enumerate(parts) if self.rank in part), None)
        if own is None:
            return None
        made = TorchCommunicator(groups[own], self._waiter.timeout)
        made._own = True
        return made

    def _duplicate(self) -> "TorchCommunicator":
        if self.size < dist.get_world_size():
            raise ConfigurationError(
                "a process group that leaves out ranks of the job cannot be duplicated: torch.distributed makes groups "
                "with all ranks only; make another one with dist.new_group() and connect to that"
            )
        made = TorchCommunicator(_new_group(self._devices, self._waiter.timeout), self._waiter.timeout)
        made._own = True
        return made

    def _release(self) -> None:
        group = self._group
        self._leave()
        if self._own:
            time.sleep(LET_GO_SECONDS)
            with suppress(ValueError):  # the script has called destroy_process_group(), which ends every group
                dist.destroy_process_group(group)

    def leave(self) -> None:
        """Close, but for groups that are in use or NCCL's: Gloo's threads and sockets are given back."""
        super().leave()
        self._end()

    def _end(self) -> None:
        """At the end of the process: close, but for a group that is in use, or whose end may be collective (NCCL).

        Gloo's threads have to end before the interpreter does: one that lets go of a tensor while Python is being taken
        down aborts the process.
        """
        if not self._closed:
            self._closed = True
            if self._busy() or "nccl" in self._devices.values():
                self._leave()
            else:
                self._release()

    def _busy(self) -> bool:
        """Whether a collective is under way here or in a part, which may share the group."""
        parts = [part for part in self._divided if isinstance(part, TorchCommunicator)]
        return self._waiter.busy() or any(part._busy() for part in parts)

    def _leave(self) -> None:
        """Let go of the group, and never free one in which a collective is under way.

        Freed, Gloo would wait until torch.distributed's limit for ranks that may be gone; a rank that raised would
        then not end, and the others would wait for it. A group that is not freed ends with the process, and the others
        hear of it at once.
        """
        _open.discard(self)
        if self._busy():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None
        self._messages.end()


class _Followed:
    """Point-to-point messages over Gloo that :class:`_Messages` waits for."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
        self.ended: Future[None] = Future()
        self.is_completed, self.wait = self.ended.done, self.ended.result


class _Messages:
    """Waits for Gloo's point-to-point messages in a thread: they are done only once somebody waits for them.

    Their order is kept, so that one thread serves however many there are.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Followed | None] = SimpleQueue()
        self._thread: Thread | None = None

    def follow(self, works: list[Any]) -> _Followed:
        """The messages ``works`` as one that can be asked whether it is done."""
        if self._thread is None:
            # A daemon: a message that never comes must not keep the process from ending.
            self._thread = Thread(target=self._run, name="ringprune messages", daemon=True)
            self._thread.start()
        followed = _Followed(works)
        self._queue.put(followed)
        return followed

    def end(self) -> None:
        """End the thread; one that still waits for a message is left to the end of the process."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(JOIN_SECONDS)  # inside torch at the end of the process it would abort it
            self._thread = None

    def _run(self) -> None:
        while (followed := self._queue.get()) is not None:
            try:
                for work in followed.works:
                    work.wait()
                followed.ended.set_result(None)
            except Exception as error:
                followed.ended.set_exception(error)


_made: dict[str, int] = {}
"""How many communicators each process group has got; all ranks make them together."""

_open: "weakref.WeakSet[TorchCommunicator]" = weakref.WeakSet()


@atexit.register
def _let_the_process_end() -> None:
    for comm in list(_open):
        comm._end()
    if dist.is_available() and dist.is_initialized():
        # The script's own group, in which it may have sent its last message a moment ago: Gloo's thread would ask for
        # Python when there is none any more, and abort the process.
        time.sleep(LAST_SECONDS)


def _checked_group(process_group: Any) -> Any:
    if not dist.is_available():
        raise DependencyError('connect("torch"): this torch was built without torch.distributed')
    if not dist.is_initialized():
        raise UsageError(
            'connect("torch"): torch.distributed is not initialised; call '
            'torch.distributed.init_process_group("gloo") first, in a job started by torchrun'
        )
    if process_group is None:
        return dist.group.WORLD
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(f'connect("torch"): rank {dist.get_rank()} is not part of the process group given')
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(f"process_group={process_group!r}: a torch.distributed.ProcessGroup, or None")
    if dist.get_rank(process_group) < 0:
        raise ConfigurationError(f'connect("torch"): rank {dist.get_rank()} is not part of the process group given')
    return process_group


def serving(config: str, *, more: bool) -> dict[str, str]:
    """Which back end serves which device.

    Args:
        config: as torch.distributed tells it: ``"cpu:gloo,cuda:nccl"``.
        more: Gloo can be added.

    Raises:
        ConfigurationError: there is none of ours; or none for host memory, and it cannot be added.
    """
    backends = dict(pair.split(":") for pair in config.split(","))
    found = {device: name for device, name in backends.items() if SERVES.get(name) == device}
    if not found:
        raise ConfigurationError(
            f'connect("torch"): the process group\'s back end is {", ".join(sorted(set(backends.values())))}; '
            "it has to be gloo (CPU) or nccl (GPUs)"
        )
    if "cpu" not in found and not more:
        raise ConfigurationError(
            'connect("torch"): the process group serves GPUs alone, and some messages are the host\'s; give none, or '
            'dist.new_group(ranks, backend="cpu:gloo,cuda:nccl")'
        )
    return {"cpu": "gloo"} | found


def _new_group(devices: Mapping[str, str], timeout: float | None, ranks: list[int] | None = None) -> Any:
    """A new group of all ranks or those given, with these back ends by device; all ranks of the job call this."""
    # The back end's own clock runs from the start of a collective, ours from when somebody waits for it: its limit is
    # kept out of the way of shorter ones.
    limit = USUAL_LIMIT if timeout is None else max(USUAL_LIMIT, timedelta(seconds=2 * timeout))
    # Of "cpu:gloo,cuda:gloo" torch 2.13 warns at the end of a process that has used DistributedDataParallel.
    backend = "gloo" if len(devices) == 1 else ",".join(f"{device}:{name}" for device, name in devices.items())
    return dist.new_group(ranks, limit, backend=backend, group_desc="ringprune")


def _moved(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes."""
    flat = tensor.detach().reshape(-1)
    # An empty one made of a NumPy array has a stride of 0, of which torch makes no view.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _bytes_of(call: Call, rows: tuple[int, ...] | None, tensor: Tensor) -> list[int]:
    return [n * call.row_numel * tensor.element_size() for n in rows or ()]
