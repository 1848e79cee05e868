"""A job for what only the horovod communicator promises; on four ranks, two of them in a process set."""

import re
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from ringprune.comm import Communicator, connect
from ringprune.comm.call import Call
from ringprune.comm.horovod import HorovodCommunicator
from ringprune.errors import ArgumentTypeError, CommunicatorError, ConfigurationError, UsageError
from tests.comm.contract import CHECKS
from tests.mpi.inside import check_together, watchdog

PART = hvd.ProcessSet([1, 3])


def is_the_default(comm: Communicator) -> None:
    assert connect().kind == "horovod"


def dtypes_that_horovod_refuses_are_named(comm: Communicator) -> None:
    for dtype in (torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.bool):
        with pytest.raises(
            ConfigurationError, match=r"Horovod's allreduce does not take this dtype, only int32.*convert"
        ):
            comm.allreduce(torch.ones(3, dtype=dtype), name="a")
    for dtype in (torch.bfloat16, torch.bool):
        with pytest.raises(ConfigurationError, match=r"Horovod's broadcast does not take this dtype, only .*view"):
            comm.broadcast(torch.ones(3, dtype=dtype), 0, name="a")
    assert comm.allreduce(torch.ones(3, dtype=torch.float16), name="a").wait().tolist() == [comm.size] * 3


def bfloat16_is_moved_as_a_view(comm: Communicator) -> None:
    tensor = torch.full((3,), comm.rank + 0.5, dtype=torch.bfloat16)
    comm.broadcast(tensor.view(torch.int16), 1, name="b").wait()
    assert tensor.tolist() == [1.5] * 3


def errors_of_horovod_name_the_collective(comm: Communicator) -> None:
    with pytest.raises(CommunicatorError, match=r'"m" \(allreduce of \d float32\) failed on rank \d: Mismatched'):
        comm.allreduce(torch.ones(3 + comm.rank), name="m").wait()
    wrong = [3] * comm.size
    wrong[comm.rank] = 2
    with pytest.raises(CommunicatorError, match=r'"g" .*expected rows'):
        comm.allgather(torch.ones(2), sizes=wrong, name="g").wait()


def long_allgathers_are_alltoalls_between_hosts(comm: Any) -> None:
    """Of one rank each; an alltoall tells what came from whom, and an allgather the sum alone."""
    assert comm._spread_out is (hvd.local_size() == 1)
    for spread, length, told in ((True, 1 << 20, "[2, 2, 2, 2]"), (True, 1, "8"), (False, 1 << 20, "8")):
        comm._spread_out = spread
        wrong = [3] * comm.size
        wrong[comm.rank] = 2
        with pytest.raises(CommunicatorError, match=rf'"g" .*expected rows .*got {re.escape(told)}'):
            comm.allgather(torch.ones(2, length), sizes=wrong, name="g").wait()
    comm._spread_out = True
    skewed = [1] * (comm.size - 1) + [3 << 20]  # copies of that on one rank would be too many
    assert not comm._copies(Call("allgather", "g", torch.float32, (1,), sizes=tuple(skewed)))
    assert not comm._copies(Call("allgather", "g", torch.float32, (1,), sizes=(1 << 29,) * comm.size)), "MPI's limit"
    rows = torch.full((1 << 20,), float(comm.rank)).requires_grad_()
    gathered = comm.allgather(rows, name="g").wait()
    assert not gathered.requires_grad
    assert gathered.view(comm.size, -1).tolist() == [[float(rank)] * (1 << 20) for rank in range(comm.size)]
    comm._spread_out = False


def errors_of_groups_name_the_collective(comm: Communicator) -> None:
    with pytest.raises(CommunicatorError, match=r'"m" \(allreduce of \d+ float32\) failed on rank \d: Mismatched'):
        comm.allreduce_group([torch.ones(5), torch.ones(3 + comm.rank)], name="m").wait()
    ones = [torch.ones(5), torch.ones(3)]
    assert comm.allreduce_group(ones, name="m").wait().tolist() == [comm.size] * 5
    assert ones[1].tolist() == [comm.size] * 3


def process_sets_that_do_not_fit_are_refused(comm: Communicator) -> None:
    with pytest.raises(ConfigurationError, match=r"not known to Horovod: hvd.add_process_set\(\) it"):
        connect("horovod", process_set=hvd.ProcessSet([0, 2]))
    with pytest.raises(ArgumentTypeError, match="process_set='all': a horovod"):
        connect("horovod", process_set="all")
    if comm.rank in (0, 2):
        assert connect("horovod", process_set=PART).size == 0
        with pytest.raises(ConfigurationError, match=f"rank {comm.rank} is not part of ProcessSet"):
            HorovodCommunicator(PART)


def nodes_need_process_sets(comm: Any) -> None:
    """Horovod was started with one set and cannot add others: those that are there serve, and errors name the rest."""
    divided = connect("horovod", timeout=20)
    divided._host = lambda: comm.rank // 2
    with pytest.raises(ConfigurationError, match=r'adds no process sets .*"dynamic"\).*: \[0, 1\], \[2, 3\]$'):
        divided.divide()
    divided._host = lambda: {1: 0, 3: 0}.get(comm.rank, comm.rank + 1)
    with pytest.raises(ConfigurationError, match=r"\[0, 1, 2\]$"):
        divided.divide()
    if PART.included():
        part: Any = connect("horovod", process_set=PART, timeout=20)
        for hosts in (1, 2):
            part._host = lambda hosts=hosts: part.rank % hosts
            nodes = part.divide()
            assert (nodes.count, nodes.local.size) == (hosts, 2 // hosts)


if __name__ == "__main__":
    watchdog()
    with pytest.raises(UsageError, match=r"call hvd.init\(\) first"):
        connect("horovod")
    hvd.init(process_sets=[PART])
    comm = connect("horovod", timeout=20)
    for each in (
        is_the_default,
        dtypes_that_horovod_refuses_are_named,
        bfloat16_is_moved_as_a_view,
        errors_of_horovod_name_the_collective,
        long_allgathers_are_alltoalls_between_hosts,
        process_sets_that_do_not_fit_are_refused,
        nodes_need_process_sets,
    ):
        check_together("horovod", each.__name__, partial(each, comm))
    part = connect("horovod", process_set=PART, timeout=20) if comm.rank in (1, 3) else None
    for name, check in CHECKS.items():
        check_together("horovod", f"{name} in a process set", partial(check, part) if part else lambda: None)
    if comm.rank == 0:
        print("horovod_only passed", flush=True)
