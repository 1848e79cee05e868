"""A job for what only the mpi communicator promises."""

import gc
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from mpi4py import MPI

import ringprune.comm.mpi
from ringprune.comm import Communicator, connect
from ringprune.comm.mpi import MpiCommunicator
from ringprune.comm.staging import HostCopy
from ringprune.errors import CommunicatorError, ConfigurationError, UsageError
from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, start


def is_the_default(comm: Communicator) -> None:
    other = connect()
    assert other.kind == "mpi"
    other.close()


def every_dtype_is_moved(comm: Communicator) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.complex128):
        tensor = torch.full((3,), comm.rank % 2, dtype=dtype)
        assert comm.broadcast(tensor.clone(), comm.size - 1, name="b").wait().dtype == dtype
        expected = [rank % 2 for rank in range(comm.size) for _ in range(3)]
        assert comm.allgather(tensor, name="g").wait().tolist() == expected


def only_some_dtypes_are_summed(comm: Communicator) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16):
        assert comm.allreduce(torch.ones(3, dtype=dtype), name="a").wait().tolist() == [comm.size] * 3
    with pytest.raises(ConfigurationError, match=r'"a" \(allreduce of 3 bfloat16\): .* convert it to one of float32'):
        comm.allreduce(torch.ones(3, dtype=torch.bfloat16), name="a")


def other_devices_are_refused(comm: Communicator) -> None:
    with pytest.raises(ConfigurationError, match=r"the tensor is on meta; .* of the CPU and of GPUs"):
        comm.allreduce(torch.ones(3, device="meta"), name="a")


def too_long_tensors_are_refused(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringprune.comm.mpi, "LARGEST_COUNT", 8)
        comm.allreduce(torch.ones(8), name="a").wait()
        with pytest.raises(ConfigurationError, match="9 elements; MPI takes at most 8 in one call: split it"):
            comm.allreduce(torch.ones(9), name="a")
        with pytest.raises(ConfigurationError, match=f"{3 * comm.size} elements"):
            comm.allgather(torch.ones(1, 3), name="g")


def the_scripts_own_messages_stay_apart(comm: Communicator) -> None:
    world, following, previous = MPI.COMM_WORLD, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own = world.isend("the script's", dest=following)
    shifted = comm.shift(torch.full((2,), comm.rank), torch.empty(2, dtype=torch.int64), name="s").wait()
    assert shifted.tolist() == [previous] * 2
    assert world.recv(source=previous) == "the script's"
    own.wait()


def no_communicator_is_a_group_seen_from_outside(comm: Communicator) -> None:
    outside = connect("mpi", communicator=MPI.COMM_NULL)
    assert (outside.rank, outside.size, outside.abilities) == (-1, 0, frozenset())
    with pytest.raises(UsageError, match='allreduce "a": this rank is not part of the group'):
        outside.allreduce(torch.ones(1), name="a")
    with pytest.raises(ConfigurationError, match="not part of the communicator"):
        ringprune.comm.mpi.MpiCommunicator(MPI.COMM_NULL)


def errors_of_mpi_name_the_collective(comm: Communicator) -> None:
    room = 5 if comm.rank == 1 else 1000  # too little on rank 1
    handle = comm.shift(torch.ones(room), torch.empty(room), name="s")
    if comm.rank != 1:
        handle.wait()
        return
    for _ in range(2):
        with pytest.raises(CommunicatorError, match=r'"s" \(shift of 5 float32\) failed on rank 1: MPI_ERR_TRUNCATE'):
            handle.wait()


class SlowCopies:
    """Copies as those of a GPU, that take a while, another one on every rank and at every call."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, 77)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        host, until = self.like(tensor), time.monotonic() + self._random.choice((0.0, 0.001, 0.01))

        def ready() -> bool:
            if time.monotonic() < until:
                return False
            host.copy_(tensor)
            return True

        return HostCopy(host, ready)

    def to_device(self, host: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(host)


def staged(comm: Communicator, device: Callable[[torch.Tensor], bool]) -> Communicator:
    """An mpi communicator that takes some tensors for those of a device."""
    own = MpiCommunicator(timeout=20)
    own._staging.copies = SlowCopies(comm.rank)
    own._is_copied = device
    return own


def order_holds_whatever_copies_take(comm: Communicator) -> None:
    """Tensors of the host in between must wait: MPI takes the n-th collective of each rank for the same one."""
    mixed = staged(comm, lambda tensor: tensor.dtype == torch.float32)
    dtypes = [random.Random(7 * i).choice((torch.float32, torch.float64)) for i in range(60)]
    handles = [mixed.allreduce(torch.full((5,), i, dtype=dtype), name=f"{i}") for i, dtype in enumerate(dtypes)]
    for i in random.Random(comm.rank).sample(range(60), 60):
        assert handles[i].wait().tolist() == [i * comm.size] * 5
    mixed.close()


def what_all_ranks_have_left_serves_again(comm: Communicator) -> None:
    """Each wrapper kept 10 KB for ever, with hierarchical=True 20, whether it was closed or collected."""

    def made() -> int:
        gc.collect()
        return len(ringprune.comm.mpi._duplicates)

    for let_go in (MpiCommunicator.leave, MpiCommunicator.close, lambda left: None):
        numbers = []
        for _ in range(3):
            other = MpiCommunicator()
            other.divide()
            assert other.allreduce(torch.ones(1), name="a").wait() == comm.size
            let_go(other)
            del other
            numbers.append(made())
        assert numbers[1:] == numbers[:1] * 2


def what_some_ranks_still_have_does_not(comm: Communicator) -> None:
    kept = MpiCommunicator()
    own = kept._own
    if comm.rank:
        kept.leave()
    other = MpiCommunicator()
    assert other._own is not own
    kept.close()
    other.close()
    others = [MpiCommunicator() for _ in range(2)]
    assert own in [each._own for each in others]
    for each in others:
        each.close()


def nor_what_another_has_taken_over_since(comm: Communicator) -> None:
    """Who had been closed left it again when collected: a third worked on it beside the second."""
    first = MpiCommunicator()
    first.close()
    second = MpiCommunicator()
    assert second._own is first._own
    first.leave()
    del first
    gc.collect()
    third = MpiCommunicator()
    assert third._own is not second._own
    for each in (second, third):
        each.close()


def nor_what_may_have_a_message_left(comm: Communicator) -> None:
    """Rank 0 has sent it and is through; who takes over would get it in place of another."""
    torn = MpiCommunicator()
    own = torn._own
    if comm.rank == 0:
        torn.broadcast(torch.ones(1), 0, name="b").wait()
    torn.leave()
    for _ in range(2):
        other = MpiCommunicator()
        assert other._own is not own
        assert other.broadcast(torch.full((1,), comm.rank), 1, name="c").wait() == 1
        other.close()
    with pytest.raises(UsageError, match="has been closed"):
        torn.broadcast(torch.ones(1), 0, name="b")


if __name__ == "__main__":
    comm = start("mpi")
    for each in (
        is_the_default,
        every_dtype_is_moved,
        only_some_dtypes_are_summed,
        other_devices_are_refused,
        too_long_tensors_are_refused,
        the_scripts_own_messages_stay_apart,
        no_communicator_is_a_group_seen_from_outside,
        errors_of_mpi_name_the_collective,
        order_holds_whatever_copies_take,
        what_all_ranks_have_left_serves_again,
        what_some_ranks_still_have_does_not,
        nor_what_another_has_taken_over_since,
        nor_what_may_have_a_message_left,
    ):
        check_together("mpi", each.__name__, partial(each, comm))
    copied = staged(comm, lambda tensor: True)
    for name, check in CHECKS.items():
        check_together("mpi", f"{name} through copies", partial(check, copied))
    copied.close()
    split = MPI.COMM_WORLD.Split(comm.rank % 2, -comm.rank)  # two parts, in reverse order
    part = connect("mpi", communicator=split, timeout=20)
    assert (part.rank, part.size) == (split.rank, split.size)
    for name, check in CHECKS.items():
        check_together("mpi", f"{name} in a part", partial(check, part))
    part.close()
    comm.close()
    if comm.rank == 0:
        print("mpi_only passed", flush=True)
