"""Device tensors over a library that sends host memory: copied there and back, in the order of the calls.

Copies run on a side stream into pinned memory, so that neither the host nor the device's other work waits for them.
Once its copy is there, a collective starts when its communicator is next asked for anything, never before those that
were called earlier: libraries match collectives by their order, which so stays the same on all ranks.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringprune.comm.call import Call

__all__ = ["CudaCopies", "HostCopy", "Staging"]

PAUSE = 50e-6

Request = Any
Start = Callable[[Call, Tensor, Tensor], list[Request]]


class HostCopy(NamedTuple):
    """A tensor in host memory that is being filled from a device.

    Attributes:
        tensor: the host's.
        ready: whether it is filled.
    """

    tensor: Tensor
    ready: Callable[[], bool]


class Copies(Protocol):
    """How tensors get from a device to the host and back, without the host waiting."""

    def like(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor of that shape and dtype."""
        ...

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Start to copy; what the caller has enqueued for the tensor on its device comes first."""
        ...

    def to_device(self, host: Tensor, into: Tensor) -> None:
        """Start to copy; what the caller enqueues on the device from now on comes after it."""
        ...


class CudaCopies:
    """Copies through pinned memory, each direction on a stream of its own. Torch keeps pinned blocks for the next call.

    On one stream, a copy to the host would come after whatever an earlier copy to the device had to wait for.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Pinned host memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copy behind the current stream's work."""
        host, side = self.like(tensor), self._side(tensor.device, "to host")
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        return HostCopy(host, side.record_event().query)

    def to_device(self, host: Tensor, into: Tensor) -> None:
        """Copy before the current stream's later work."""
        side, current = self._side(into.device, "to device"), torch.cuda.current_stream(into.device)
        side.wait_stream(current)  # may still read what was in `into`
        with torch.cuda.stream(side):
            into.copy_(host, non_blocking=True)
        into.record_stream(side)
        current.wait_stream(side)

    def _side(self, device: torch.device, way: str) -> Any:
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return self._streams[device, way]


class Staged:
    """A collective that starts when its copy is there.

    Args:
        staging: where it waits.
        call: what it is.
        source: what is sent.
        into: host memory for the result.
        target: where the result goes then; None leaves it.
    """

    def __init__(self, staging: "Staging", call: Call, source: HostCopy, into: Tensor, target: Tensor | None) -> None:
        self._staging, self.call, self.source, self.into, self._target = staging, call, source, into, target
        self._requests: list[Request] | None = None
        self._failure: Exception | None = None

    def start(self, start: Start) -> None:
        """Hand it to the library; an error is this collective's, whoever asked for it to be started."""
        try:
            self._requests = start(self.call, self.source.tensor, self.into)
        except Exception as error:
            self._failure = error

    def done(self) -> bool:
        """Whether the library is through with it; asking starts what can be started.

        Raises:
            Exception: the library's, where it could not be started.
        """
        self._staging.start_ready()
        if self._failure is not None:
            raise self._failure
        return self._requests is not None and all(request.Test() for request in self._requests)

    def result(self) -> Tensor:
        """The result where the caller wants it."""
        if self._target is None:
            return self.into
        self._staging.copies.to_device(self.into, self._target.detach())
        return self._target


class Staging:
    """Collectives on their way through host memory.

    Args:
        start: hands a collective of host tensors to the library.
        copies: how tensors get to the host and back.
    """

    def __init__(self, start: Start, copies: Copies) -> None:
        self._start, self.copies = start, copies
        self._waiting: deque[Staged] = deque()

    def add(self, call: Call, tensor: Tensor, into: Tensor, *, copied: bool, receives: bool) -> Staged:
        """Start a collective behind those that wait for their copies.

        Args:
            call: what it is.
            tensor: sent.
            into: where the result comes, perhaps ``tensor``.
            copied: the tensors are on a device; False: in host memory, where they are used as they are.
            receives: nothing of ``tensor`` is sent: it needs no copy.
        """
        if copied:
            source = HostCopy(self.copies.like(tensor), _ready) if receives else self.copies.to_host(tensor.detach())
            # Only a broadcast has to be in place; MPI sums faster out of place.
            host = source.tensor if call.op == "broadcast" else self.copies.like(into)
            staged = Staged(self, call, source, host, into)
        else:
            staged = Staged(self, call, HostCopy(tensor, _ready), into, None)
        self._waiting.append(staged)
        self.start_ready()
        return staged

    def start_ready(self) -> None:
        """Start those in front whose copies are there."""
        while self._waiting and self._waiting[0].source.ready():
            self._waiting.popleft().start(self._start)

    def start_all(self) -> None:
        """Wait for the copies and start everything: before a blocking collective that goes past this queue."""
        while self._waiting:
            self.start_ready()
            time.sleep(PAUSE)

    @property
    def waiting(self) -> bool:
        """Whether a collective waits for its copy: later ones must wait behind it."""
        return bool(self._waiting)


def _ready() -> bool:
    return True
