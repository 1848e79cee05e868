"""A job for what only the torch communicator promises; on four ranks, some of them in groups of their own."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringprune.comm import Communicator, connect
from ringprune.comm.torch_distributed import SUMMED, TorchCommunicator
from ringprune.errors import ArgumentTypeError, CommunicatorError, ConfigurationError, UsageError
from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, watchdog


def is_the_default(comm: Communicator) -> None:
    other = connect()
    assert other.kind == "torch"
    other.close()


def every_dtype_is_moved(comm: Communicator) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int16, torch.uint32, torch.complex64):
        tensor = torch.full((3,), comm.rank % 2, dtype=dtype)
        assert comm.broadcast(tensor.clone(), comm.size - 1, name="b").wait().dtype == dtype
        expected = [rank % 2 for rank in range(comm.size) for _ in range(3)]
        assert comm.allgather(tensor, name="g").wait().tolist() == expected
        received = comm.shift(tensor, torch.empty_like(tensor), name="s").wait()
        assert received.tolist() == [(comm.rank - 1) % comm.size % 2] * 3


def only_some_dtypes_are_summed(comm: Communicator) -> None:
    for dtype in SUMMED:
        result = comm.allreduce(torch.ones(3, dtype=dtype), name="a").wait()
        assert result.dtype == dtype
        assert result.tolist() == [comm.size] * 3
    for dtype in (torch.int16, torch.bool):
        kind = str(dtype).removeprefix("torch.")
        with pytest.raises(ConfigurationError, match=rf'"a" \(allreduce of 3 {kind}\): .* to one of float32'):
            comm.allreduce(torch.ones(3, dtype=dtype), name="a")


def other_devices_are_refused(comm: Communicator) -> None:
    with pytest.raises(ConfigurationError, match=r"the tensor is on meta; this process group serves cpu \(gloo\)"):
        comm.allreduce(torch.ones(3, device="meta"), name="a")


def the_scripts_own_collectives_stay_apart(comm: Communicator) -> None:
    mine, own = torch.ones(3), torch.full((7,), 2.0)
    if comm.rank % 2:  # in another order on some ranks
        handle = comm.allreduce(mine, name="a")
        dist.all_reduce(own)
    else:
        work = dist.all_reduce(own, async_op=True)
        handle = comm.allreduce(mine, name="a")
        work.wait()
    assert handle.wait().tolist() == [comm.size] * 3
    assert own.tolist() == [2.0 * comm.size] * 7


def groups_that_do_not_fit_are_refused(comm: Communicator) -> None:
    pair = dist.new_group([0, 2])
    if comm.rank in (1, 3):
        assert connect("torch", process_group=pair).size == 0
        with pytest.raises(ConfigurationError, match=f"rank {comm.rank} is not part of the process group given"):
            TorchCommunicator(pair)
    with pytest.raises(ArgumentTypeError, match=r"process_group='all': a torch\.distributed\.ProcessGroup"):
        connect("torch", process_group="all")


def a_part_of_the_ranks_is_divided_only_where_it_needs_no_new_group(comm: Communicator) -> None:
    threes = dist.new_group([1, 2, 3])
    if not comm.rank:
        return
    part: Any = connect("torch", process_group=threes, timeout=20)
    for hosts, local in (([0, 0, 0], 3), ([0, 1, 2], 1)):
        part._host = lambda hosts=hosts: hosts[part.rank]
        nodes = part.divide()
        assert (nodes.local.size, nodes.count) == (local, len(set(hosts)))
    part._host = lambda: part.rank // 2
    with pytest.raises(ConfigurationError, match="leaves out ranks of the job cannot be divided by node"):
        part.divide()


def waits_are_given_up(comm: Communicator) -> None:
    """A late rank; the collective goes on all the same, and what comes after it works."""
    hasty, given_up = connect("torch", timeout=0.3), torch.ones(1)
    if comm.rank == 0:
        dist.recv(given_up, 1)  # rank 1 has waited in vain, however long that took
    for op in ("allreduce", "shift"):
        if op == "allreduce":
            handle = hasty.allreduce(torch.ones(2), name="late")
        else:
            handle = hasty.shift(torch.ones(2), torch.empty(2), name="late")
        if comm.rank == 1:
            for _ in range(2):
                with pytest.raises(CommunicatorError, match=rf'"late" \({op} of 2 float32\) was not done after 0.3 s'):
                    handle.wait()
    if comm.rank == 1:
        dist.send(given_up, 0)
    dist.barrier()
    hasty.close()


def closing_gives_back_only_what_was_made(comm: Communicator) -> None:
    group = dist.new_group(list(range(comm.size)))
    for options in ({"process_group": group}, {}):
        other = connect("torch", **options)
        other.close()
        with pytest.raises(UsageError, match="this communicator has been closed"):
            other.allreduce(torch.ones(2), name="a")
    dist.barrier(group)
    dist.destroy_process_group(group)


def the_end_of_the_process_closes(comm: Communicator) -> None:
    """A script's own exit handler may close it after ours has: that once destroyed the script's groups."""
    other = connect("torch")
    other._end()
    other.close()
    assert dist.is_initialized()
    with pytest.raises(UsageError, match="this communicator has been closed"):
        other.allreduce(torch.ones(2), name="a")


if __name__ == "__main__":
    watchdog()
    with pytest.raises(UsageError, match=r"call torch.distributed.init_process_group\(\"gloo\"\) first"):
        connect("torch")
    dist.init_process_group("gloo")
    comm = connect("torch", timeout=20)
    for each in (
        is_the_default,
        every_dtype_is_moved,
        only_some_dtypes_are_summed,
        other_devices_are_refused,
        the_scripts_own_collectives_stay_apart,
        groups_that_do_not_fit_are_refused,
        a_part_of_the_ranks_is_divided_only_where_it_needs_no_new_group,
        waits_are_given_up,
        closing_gives_back_only_what_was_made,
        the_end_of_the_process_closes,
    ):
        check_together("torch", each.__name__, partial(each, comm))
    threes = dist.new_group([1, 2, 3])
    part = connect("torch", process_group=threes, timeout=20) if comm.rank else None
    assert part is None or (part.rank, part.size) == (comm.rank - 1, 3)
    for name, check in CHECKS.items():
        check_together("torch", f"{name} in a part", partial(check, part) if part else lambda: None)
    last = comm.rank == comm.size - 1
    dist.destroy_process_group()
    comm.close()  # nothing is left to give back
    if last:
        print("torch_only passed", flush=True)
