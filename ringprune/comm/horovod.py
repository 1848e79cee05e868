"""Collectives over Horovod, which runs them in a background thread over MPI, Gloo or NCCL.

The one file that imports Horovod.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from ringprune.comm.call import LARGEST_COUNT, Call
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import Ability, Handle
from ringprune.comm.waiting import Waiter
from ringprune.errors import ArgumentTypeError, CollectiveMismatchError, ConfigurationError, UsageError

__all__ = ["HorovodCommunicator"]

EAGER_SECONDS = 0.0  # the background thread needs the core more than we do

SPREAD_BYTES = 1 << 22
"""Of an allgather that is made as an alltoall, for which Horovod first has to tell all ranks what comes from whom."""

SUMMED = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
MOVED = (torch.uint8, torch.int8, torch.int16, *SUMMED)


_made: Counter[int] = Counter()


class HorovodCommunicator(CheckedCommunicator):
    """The ranks of Horovod, or of one of its process sets; tensors wherever this build of Horovod takes them.

    Horovod matches collectives by name, and has no point-to-point messages: no ``shift``.

    Args:
        process_set: a ``horovod.torch.ProcessSet`` that has been added and holds this rank; None is all ranks.
        timeout: seconds that a rank may wait in one collective; None is no limit.
    """

    kind = "horovod"
    abilities: frozenset[Ability] = frozenset({"broadcast", "allreduce", "group", "allgather", "alltoall", "divide"})

    def __init__(self, process_set: Any = None, timeout: float | None = None) -> None:
        _check_initialised()
        self._process_set = hvd.global_process_set if process_set is None else process_set
        _check_process_set(self._process_set)
        super().__init__(self._process_set.rank(), self._process_set.size())
        # Horovod matches by name alone: two communicators may be in collectives of the same name at the same time.
        # Counted per process set, since only its ranks make a communicator of it.
        self._number = _made[self._process_set.process_set_id]
        _made[self._process_set.process_set_id] += 1
        # With several ranks on a host what all hand to all crosses its link again and again.
        self._spread_out = bool(hvd.mpi_enabled()) and hvd.cross_size() == hvd.size()
        self._waiter = Waiter(self.rank, timeout, EAGER_SECONDS, (HorovodInternalError, ValueError))

    @staticmethod
    def start() -> Callable[[], None]:
        """Start Horovod, which stops at the end of the program: until then others may use the MPI that it started."""
        hvd.init()
        return lambda: None

    @staticmethod
    def leaves_out(process_set: Any) -> bool:
        """Whether this rank is outside a process set."""
        _check_initialised()
        _check_registered(process_set)
        return not process_set.included()

    def _make_parts(self, parts: Sequence[Sequence[int]]) -> "HorovodCommunicator | None":
        ranks = self._process_set.ranks
        wanted = [tuple(ranks[rank] for rank in part) for part in parts]
        known = _known()
        missing = [part for part in wanted if part not in known]
        if missing and len(ranks) < hvd.size():
            # Adding one is collective over all ranks of Horovod, and those outside this set are not here.
            raise ConfigurationError(_ask_for(missing, f"{self._process_set} cannot be divided"))
        for part in missing:
            known[part] = _added(part, missing)
        own = next((part for part in wanted if hvd.rank() in part), None)
        return None if own is None else HorovodCommunicator(known[own], self._waiter.timeout)

    def _duplicate(self) -> "HorovodCommunicator":
        return HorovodCommunicator(self._process_set, self._waiter.timeout)

    def _start(self, call: Call, tensor: Tensor, into: Tensor) -> Handle:
        return self._under_way(call, lambda: self._enqueue(call, tensor), into, tensor)

    def _start_group(self, call: Call, tensors: Sequence[Tensor], factor: float) -> Handle:
        # Horovod copies them into its fusion buffer and back, and multiplies, in its own thread.
        def enqueue() -> int:
            return int(
                hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, postscale_factor=factor, **self._options(call))
            )

        return self._under_way(call, enqueue, tensors[0], tensors)

    def _under_way(self, call: Call, enqueue: Callable[[], int], into: Tensor, kept: object) -> Handle:
        try:
            number = enqueue()
        except self._waiter.library_errors as error:
            raise self._waiter.failed(call, error) from error
        return self._waiter.handle(
            call, done=lambda: bool(hvd.poll(number)), result=lambda: _result(call, number, into), kept=kept
        )

    def _options(self, call: Call) -> dict[str, Any]:
        return {"name": f"ringprune {self._number}: {call.name}", "process_set": self._process_set}

    def _enqueue(self, call: Call, tensor: Tensor) -> int:
        """Hand the collective to the background thread; returns Horovod's number for it."""
        options = self._options(call)
        if call.op == "broadcast":
            root = self._process_set.ranks[call.root]  # Horovod's broadcast wants the global rank
            return int(hvd.broadcast_async_(tensor, root, **options))
        if call.op == "allreduce":
            return int(hvd.allreduce_async_(tensor, op=hvd.Sum, **options))
        splits = call.splits
        if call.op == "allgather":
            if tensor.device.type != "cpu" or not self._copies(call):
                return int(hvd.allgather_async(tensor, **options))
            tensor, splits = torch.cat([tensor.detach()] * self.size), (tensor.shape[0],) * self.size
        return int(hvd.alltoall_async(tensor, splits=torch.tensor(splits, dtype=torch.int32, device="cpu"), **options))

    def _copies(self, call: Call) -> bool:
        """Whether an allgather is made as an alltoall of as many copies as there are ranks; the same on all of them."""
        copies = self.size * max(call.sizes or (0,)) * call.row_numel
        few = copies <= min(2 * call.largest_count, LARGEST_COUNT)  # not where one rank has nearly all
        return self._spread_out and few and self._spreads(call, SPREAD_BYTES)

    def _check_support(self, call: Call, tensor: Tensor) -> None:
        known = SUMMED if call.op == "allreduce" else MOVED
        if call.dtype not in known:
            instead = "convert it" if call.op == "allreduce" else "send tensor.view() of an integer dtype of its width"
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
            raise ConfigurationError(f"{call}: Horovod's {call.op} does not take this dtype, only {names}; {instead}")


def _check_initialised() -> None:
    if not hvd.is_initialized():
        raise UsageError('connect("horovod"): Horovod is not initialised; call hvd.init() first')


def _check_registered(process_set: Any) -> None:
    if not isinstance(process_set, hvd.ProcessSet):
        raise ArgumentTypeError(f"process_set={process_set!r}: a horovod.torch.ProcessSet, or None")
    if process_set.process_set_id is None:
        raise ConfigurationError(f'connect("horovod"): {process_set} is not known to Horovod: hvd.add_process_set() it')


def _check_process_set(process_set: Any) -> None:
    _check_registered(process_set)
    if not process_set.included():
        raise ConfigurationError(f'connect("horovod"): rank {hvd.rank()} is not part of {process_set}')


def _known() -> dict[tuple[int, ...], Any]:
    """The process sets that Horovod has, by their ranks."""
    sets = {}
    # Horovod has no public way to find a set by its ranks, and refuses to add one twice.
    for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items():
        found = hvd.ProcessSet(list(ranks))
        found.process_set_id = number
        sets[tuple(ranks)] = found
    return sets


def _added(part: tuple[int, ...], missing: Sequence[tuple[int, ...]]) -> Any:
    try:
        return hvd.add_process_set(list(part))
    except ValueError as error:
        raise ConfigurationError(_ask_for(missing, "Horovod adds no process sets while it runs")) from error


def _ask_for(missing: Sequence[tuple[int, ...]], why: str) -> str:
    sets = ", ".join(str(list(part)) for part in missing)
    return (
        f'ranks are divided by node into process sets, and {why}: call hvd.init(process_sets="dynamic") and divide '
        f"all ranks, or name these in hvd.init(process_sets=[...]): {sets}"
    )


def _result(call: Call, number: int, into: Tensor) -> Tensor:
    """What Horovod has made; it allocates the results of allgather and alltoall itself."""
    output = hvd.synchronize(number)
    if not call.by_rows:
        return into
    result, received = output if isinstance(output, tuple) else (output, None)  # an alltoall tells what came from whom
    expected = call.sizes or call.received
    if result.shape != into.shape or (received is not None and tuple(received.tolist()) != expected):
        raise CollectiveMismatchError(
            f"{call}: expected rows {list(expected or ())} from the ranks, "
            f"got {result.shape[0] if received is None else received.tolist()}"
        )
    assert isinstance(result, Tensor)
    return result
