"""The messages of a step by themselves: what an exchange asks of the network, with nothing computed in between."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ringprune.comm import Communicator

__all__ = ["Recorder"]


class _Start(NamedTuple):
    call: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Wait(NamedTuple):
    number: int
    """Of the start that is waited for."""


class _NotedHandle:
    def __init__(self, handle: Any, noted: Callable[[], None]) -> None:
        self._handle, self._noted = handle, noted

    def done(self) -> bool:
        over: bool = self._handle.done()
        return over

    def wait(self) -> Tensor:
        self._noted()
        result: Tensor = self._handle.wait()
        return result


def _passed_on(call: str) -> Callable[..., _NotedHandle]:
    def method(self: "Recorder", *arguments: Any, **options: Any) -> _NotedHandle:
        return self._start(call, arguments, options)

    method.__doc__ = f"Pass on, and note: see ``Communicator.{call}``."
    return method


class Recorder:
    """A communicator that notes which messages are started and waited for, in which order, and can send them again.

    Args:
        comm: what carries them.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.kind, self.rank, self.size = comm.kind, comm.rank, comm.size
        self.abilities, self.traffic, self.threads = comm.abilities, comm.traffic, comm.threads
        self._starts = 0
        self._log: list[_Start | _Wait] | None = None

    broadcast = _passed_on("broadcast")
    allreduce = _passed_on("allreduce")
    allreduce_group = _passed_on("allreduce_group")
    allgather = _passed_on("allgather")
    alltoall = _passed_on("alltoall")
    shift = _passed_on("shift")

    def progress(self) -> None:
        """Not noted: nothing is sent."""
        self._comm.progress()

    def barrier(self, *, name: str) -> None:
        """Not noted: no step has one."""
        self._comm.barrier(name=name)

    def divide(self, *arguments: Any, **options: Any) -> Any:
        """Not noted: what goes on inside a node is another communicator's."""
        return self._comm.divide(*arguments, **options)

    def duplicate(self) -> Communicator:
        """Not noted."""
        return self._comm.duplicate()

    def close(self) -> None:
        """Close what carries the messages."""
        self._comm.close()

    def record(self) -> None:
        """Note everything from here on."""
        self._starts, self._log = 0, []

    def send_again(self) -> None:
        """Send what was noted since :meth:`record`, other bytes of the same sizes; all ranks together."""
        log, self._log = self._log or [], None
        handles = []
        for event in log:
            if isinstance(event, _Start):
                handles.append(getattr(self._comm, event.call)(*event.arguments, **event.options))
            else:
                handles[event.number].wait()

    def _start(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> _NotedHandle:
        number = self._starts
        if self._log is not None:
            self._log.append(_Start(call, tuple(map(_copied, arguments)), options))
            self._starts += 1
        log = self._log

        def waited() -> None:
            if log is not None and log is self._log:
                log.append(_Wait(number))

        return _NotedHandle(getattr(self._comm, call)(*arguments, **options), waited)


def _copied(argument: Any) -> Any:
    """Memory of its own for every tensor: when it is sent again nobody else may read it."""
    if isinstance(argument, Tensor):
        return argument.clone()
    if isinstance(argument, Sequence) and argument and isinstance(argument[0], Tensor):
        return [tensor.clone() for tensor in argument]
    return argument
