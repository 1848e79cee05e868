"""What every communicator has to do: one suite of checks, run on every rank of simulated groups and of real jobs.

Each check takes a communicator and is called by all its ranks together. Expected values are written in ``rank`` and
``size``, so the same checks serve any number of ranks. ``CHECKS`` lists them by name.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ringprune.comm import Communicator, Handle
from ringprune.comm.communicator import is_communicator
from ringprune.errors import ArgumentTypeError, ConfigurationError

SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)
MOVED = (*SUMMED, torch.uint8, torch.int8, torch.int16)

Check = Callable[[Communicator], None]
CHECKS: dict[str, Check] = {}


def contract(check: Check) -> Check:
    """Add a check to the suite."""
    CHECKS[check.__name__] = check
    return check


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    """The same dtype, shape and bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.numpy().tobytes() == expected.numpy().tobytes()


def noise(rank: int, *shape: int) -> Tensor:
    """Random float32 values that every rank can compute for every other."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + rank))


@contract
def facts(comm: Communicator) -> None:
    assert is_communicator(comm)
    assert 0 <= comm.rank < comm.size
    assert comm.kind in ("horovod", "mpi", "simulated", "torch")
    assert {"broadcast", "allreduce", "allgather", "alltoall"} <= comm.abilities
    ranks = comm.allgather(torch.tensor([comm.rank]), name="ranks").wait()
    assert ranks.tolist() == list(range(comm.size))


@contract
def broadcast_gives_the_roots_tensor(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in MOVED:
            tensor = torch.arange(6, dtype=dtype).reshape(2, 3) + comm.rank
            result = comm.broadcast(tensor, root, name="b").wait()
            assert result is tensor
            assert_same_bytes(result, torch.arange(6, dtype=dtype).reshape(2, 3) + root)


@contract
def allreduce_sums(comm: Communicator) -> None:
    for dtype in SUMMED:
        tensor = torch.arange(5, dtype=dtype) + comm.rank
        result = comm.allreduce(tensor, name="a").wait()
        assert result is tensor
        ranks_sum = comm.size * (comm.size - 1) // 2
        assert_same_bytes(result, torch.arange(5, dtype=dtype) * comm.size + ranks_sum)


@contract
def allreduce_gives_every_rank_the_same_bytes(comm: Communicator) -> None:
    for numel in (1, 17, 1000, 100_003):
        result = comm.allreduce(noise(comm.rank, numel), name="a").wait()
        parts = torch.stack([noise(rank, numel).double() for rank in range(comm.size)])
        # Each of the size - 1 additions in float32 rounds by at most 2^-24 of a partial sum.
        bound = comm.size * 2**-24 * parts.abs().sum(0)
        assert bool(((result.double() - parts.sum(0)).abs() <= bound).all())
        everybodys = comm.allgather(result.view(torch.int32), name="g").wait().view(comm.size, numel)
        assert bool((everybodys == everybodys[0]).all())


@contract
def groups_are_summed_where_they_are(comm: Communicator) -> None:
    shapes = ((2, 3), (), (0,), (5,))
    if "group" not in comm.abilities:
        with pytest.raises(ConfigurationError, match=f"{comm.kind} communicator sums single tensors"):
            comm.allreduce_group([torch.ones(3)], name="a")
        return
    for dtype, factor in ((torch.float32, 1.0), (torch.float32, 0.25), (torch.float64, 1.0 / 3), (torch.float16, 1.0)):
        tensors = [torch.full(shape, i + comm.rank, dtype=dtype) for i, shape in enumerate(shapes)]
        before = comm.traffic.payload_bytes
        handle = comm.allreduce_group(tensors, factor=factor, name="a")
        assert handle.wait() is tensors[0]
        assert comm.traffic.payload_bytes - before == 12 * dtype.itemsize
        for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            total = comm.size * i + comm.size * (comm.size - 1) // 2
            assert_same_bytes(tensor, torch.full(shape, total, dtype=dtype) * factor)
    handles = [comm.allreduce_group([torch.ones(1 + i), torch.ones(2)], name=f"a{i}") for i in range(20)]
    assert [handle.wait().sum().item() for handle in handles] == [comm.size * (1 + i) for i in range(20)]
    for wrong, words in (([], "no tensors"), ([torch.ones(1), torch.ones(1).double()], "several dtypes or devices")):
        with pytest.raises(ConfigurationError, match=words):
            comm.allreduce_group(wrong, name="a")
    with pytest.raises(ConfigurationError, match="dense and contiguous"):
        comm.allreduce_group([torch.ones(3), torch.ones(3, 2).t()], name="a")


@contract
def allgather_concatenates_in_rank_order(comm: Communicator) -> None:
    for dtype in MOVED:
        tensor = torch.full((2, 3), comm.rank, dtype=dtype)
        result = comm.allgather(tensor, name="g").wait()
        assert_same_bytes(result, torch.arange(comm.size).repeat_interleave(2).to(dtype)[:, None].expand(-1, 3))
        assert result.data_ptr() != tensor.data_ptr()


@contract
def allgather_takes_different_sizes(comm: Communicator) -> None:
    sizes = [(3 * rank + 1) % 4 for rank in range(comm.size)]  # some of them 0
    result = comm.allgather(noise(comm.rank, sizes[comm.rank], 2), sizes=sizes, name="g").wait()
    assert_same_bytes(result, torch.cat([noise(rank, sizes[rank], 2) for rank in range(comm.size)]))


@contract
def allgather_of_long_messages_is_the_same(comm: Communicator) -> None:
    """From some length on each rank sends its rows to all others itself; nothing else changes."""
    for rows in (400_000, 400_005):
        sizes = [rows if rank % 2 else rank for rank in range(comm.size)]  # that of rank 0 is 0
        before = comm.traffic.bytes_sent
        result = comm.allgather(noise(comm.rank, sizes[comm.rank], 3), sizes=sizes, name="g").wait()
        assert_same_bytes(result, torch.cat([noise(rank, sizes[rank], 3) for rank in range(comm.size)]))
        assert comm.traffic.bytes_sent - before == pytest.approx(12 * sum(sizes) * (comm.size - 1) / comm.size)
    handles = [comm.allgather(torch.full((400_000,), float(comm.rank + i)), name=f"g{i}") for i in range(3)]
    for i, handle in enumerate(handles):
        assert handle.wait().view(comm.size, -1)[:, -1].tolist() == [float(rank + i) for rank in range(comm.size)]


@contract
def alltoall_divides_evenly(comm: Communicator) -> None:
    for dtype in MOVED:
        tensor = (torch.arange(2 * comm.size) + 10 * comm.rank).to(dtype)
        result = comm.alltoall(tensor, name="t").wait()
        expected = [10 * rank + 2 * comm.rank + i for rank in range(comm.size) for i in (0, 1)]
        assert_same_bytes(result, torch.tensor(expected).to(dtype))


@contract
def alltoall_takes_uneven_pieces(comm: Communicator) -> None:
    ranks = range(comm.size)
    rows = [[(source + 2 * target) % 3 for target in ranks] for source in ranks]  # some of them 0
    tensors = [noise(rank, sum(rows[rank]), 2) for rank in ranks]
    received = [rows[source][comm.rank] for source in ranks]
    result = comm.alltoall(tensors[comm.rank], splits=rows[comm.rank], received=received, name="t").wait()
    assert_same_bytes(result, torch.cat([tensors[source].split(rows[source])[comm.rank] for source in ranks]))


@contract
def shift_passes_to_the_next_rank(comm: Communicator) -> None:
    into = torch.empty(4)
    if "shift" not in comm.abilities:
        with pytest.raises(ConfigurationError, match=f"{comm.kind} communicator cannot shift"):
            comm.shift(torch.ones(4), into, name="s")
        return
    handles = [comm.shift(torch.full((4,), comm.rank + i / 2), torch.empty(4), name=f"s{i}") for i in range(5)]
    for i, handle in enumerate(handles):
        assert handle.wait().tolist() == [(comm.rank - 1) % comm.size + i / 2] * 4
    assert comm.shift(torch.zeros(4), into, name="s").wait() is into
    for other in (torch.empty(3), torch.empty(4).double(), torch.empty(4, device="meta")):
        with pytest.raises(ConfigurationError, match="another tensor of the same shape, dtype and device"):
            comm.shift(torch.zeros(4), other, name="s")


@contract
def nobody_leaves_a_barrier_before_all_have_come(comm: Communicator) -> None:
    if comm.rank == comm.size // 2:
        time.sleep(0.05)
    came = time.monotonic()
    comm.barrier(name="b")
    left = time.monotonic()
    times = comm.allgather(torch.tensor([came, left], dtype=torch.float64), name="t").wait().view(-1, 2)
    assert times[:, 1].min() >= times[:, 0].max(), "of one clock: all ranks are on one machine"


@contract
def a_barrier_meets_no_other_call(comm: Communicator) -> None:
    """What some ranks start before it and some after it goes where it should."""
    if comm.kind not in ("mpi", "torch"):
        return  # calls are told apart by their names
    into = torch.empty(5)

    def start() -> list[Handle]:
        handles = [comm.allreduce(torch.full((3,), comm.rank), name="a")]
        return [*handles, comm.shift(torch.full((5,), float(comm.rank)), into, name="s")]

    handles = start() if comm.rank % 2 else []
    comm.barrier(name="b")
    total, shifted = (handle.wait() for handle in handles or start())
    assert total.tolist() == [sum(range(comm.size))] * 3
    assert shifted.tolist() == [(comm.rank - 1) % comm.size] * 5


@contract
def many_collectives_are_under_way_at_once(comm: Communicator) -> None:
    handles = [comm.allreduce(noise(comm.rank + i, 50), name=f"a{i}") for i in range(40)]
    gathers = [comm.allgather(torch.tensor([i, comm.rank]), name=f"g{i}") for i in range(40)]
    for i in reversed(range(40)):  # waited for in another order than started
        parts = torch.stack([noise(rank + i, 50) for rank in range(comm.size)])
        bound = comm.size * 2**-23 * parts.abs().sum(0)
        assert bool(((handles[i].wait() - parts.sum(0)).abs() <= bound).all())
        assert gathers[i].wait().tolist() == [n for rank in range(comm.size) for n in (i, rank)]


@contract
def calls_do_not_wait_for_other_ranks(comm: Communicator) -> None:
    # The ranks wait for each other's last call before they wait for their first.
    handles = [comm.broadcast(torch.full((3,), comm.rank), root, name=f"b{root}") for root in range(comm.size)]
    handles += [comm.allreduce(torch.ones(200_000, dtype=torch.int64), name=f"a{i}") for i in range(3)]
    assert [handle.wait()[0].item() for handle in reversed(handles)] == [*[comm.size] * 3, *reversed(range(comm.size))]


@contract
def a_handle_can_be_waited_for_again(comm: Communicator) -> None:
    handle = comm.allreduce(torch.ones(3), name="a")
    result = handle.wait()
    result += 1  # now it is the caller's, and a second wait must not touch it
    assert handle.wait() is result
    assert result.tolist() == [comm.size + 1] * 3


@contract
def names_can_be_used_again_with_other_shapes(comm: Communicator) -> None:
    for numel in (3, 5, 3, 1000):
        assert comm.allreduce(torch.ones(numel), name="again").wait().sum().item() == numel * comm.size
        assert comm.allgather(torch.ones(numel), name="again").wait().numel() == numel * comm.size


@contract
def empty_tensors_and_scalars(comm: Communicator) -> None:
    assert comm.allreduce(torch.empty(0), name="a").wait().numel() == 0
    assert comm.broadcast(torch.empty(0, 3), 0, name="b").wait().shape == (0, 3)
    assert comm.allgather(torch.empty(0, 3), name="g").wait().shape == (0, 3)
    assert comm.allgather(torch.empty(2, 0), name="h").wait().shape == (2 * comm.size, 0)
    assert comm.alltoall(torch.empty(0), name="t").wait().numel() == 0
    of_numpy = torch.from_numpy(np.empty(0, np.int32))  # with a stride of 0
    assert comm.broadcast(of_numpy, 0, name="n").wait().numel() == 0
    # One rank sends nothing to anybody, as where its entries are all its own.
    sent, first = (torch.ones(1, dtype=torch.int32), 1) if comm.rank else (of_numpy, 0)
    splits = [first] + [0] * (comm.size - 1)
    received = [0] * comm.size if comm.rank else [0] + [1] * (comm.size - 1)
    found = comm.alltoall(sent, splits=splits, received=received, name="o").wait()
    assert found.numel() == (0 if comm.rank else comm.size - 1)
    assert comm.allreduce(torch.tensor(1.0), name="s").wait().item() == comm.size
    assert comm.broadcast(torch.tensor(comm.rank), comm.size - 1, name="r").wait().item() == comm.size - 1


@contract
def parameters_can_be_sent(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
    assert comm.broadcast(weight, comm.size - 1, name="w").wait() is weight
    assert weight.tolist() == [[comm.size - 1.0] * 2] * 2
    assert not comm.allgather(weight, name="g").wait().requires_grad


@contract
def bytes_are_counted_once_by_formula(comm: Communicator) -> None:
    size, row = comm.size, 3 * 4
    sizes = [rank % 3 for rank in range(size)]

    def assert_counts(call: Callable[[], object], bytes_sent: float, payload: int) -> None:
        sent_before, payload_before = comm.traffic.bytes_sent, comm.traffic.payload_bytes
        call()
        assert comm.traffic.bytes_sent - sent_before == pytest.approx(bytes_sent, rel=1e-12)
        assert comm.traffic.payload_bytes - payload_before == payload

    block, own, pieces = torch.ones(2, 3), torch.ones(sizes[comm.rank], 3), torch.ones(size, 3)
    share = (size - 1) / size
    assert_counts(lambda: comm.broadcast(block, 0, name="b").wait(), share * 2 * row, 2 * row)
    assert_counts(lambda: comm.allreduce(block, name="a").wait(), 2 * share * 2 * row, 2 * row)
    assert_counts(lambda: comm.allgather(block, name="g").wait(), share * size * 2 * row, size * 2 * row)
    gathered = sum(sizes) * row
    assert_counts(lambda: comm.allgather(own, sizes=sizes, name="h").wait(), share * gathered, gathered)
    to_others = (size - 1) * row
    assert_counts(lambda: comm.alltoall(pieces, name="t").wait(), to_others, to_others)
    if "shift" in comm.abilities:
        shifted = 2 * row if size > 1 else 0
        assert_counts(lambda: comm.shift(block, torch.empty(2, 3), name="s").wait(), shifted, shifted)
    tokens = 4 * (size - 1)  # torch's store counts for itself
    by_kind = {"mpi": (tokens, tokens), "torch": (0, 0)}
    assert_counts(lambda: comm.barrier(name="b"), *by_kind.get(comm.kind, (tokens, 4 * size if size > 1 else 0)))


@contract
def wrong_arguments_are_refused_before_anything_is_sent(comm: Communicator) -> None:
    before = comm.traffic.payload_bytes
    with pytest.raises(ConfigurationError, match=f'broadcast "x": root is {comm.size}'):
        comm.broadcast(torch.ones(1), comm.size, name="x")
    with pytest.raises(ConfigurationError, match='allreduce "x": the tensor must be dense and contiguous'):
        comm.allreduce(torch.ones(3, 2).t(), name="x")
    with pytest.raises(ArgumentTypeError, match='allreduce "x": expected a tensor, got list'):
        comm.allreduce([1.0], name="x")
    with pytest.raises(ConfigurationError, match="needs a first dimension"):
        comm.allgather(torch.tensor(1.0), name="x")
    with pytest.raises(ConfigurationError, match=f"needs {comm.size} numbers of rows"):
        comm.allgather(torch.ones(1), sizes=[1] * (comm.size + 1), name="x")
    with pytest.raises(ConfigurationError, match=r"sizes\[\d+\] is 2, but this rank has 1 rows"):
        comm.allgather(torch.ones(1), sizes=[2] * comm.size, name="x")
    with pytest.raises(ConfigurationError, match="splits sum to"):
        comm.alltoall(torch.ones(comm.size), splits=[2] * comm.size, name="x")
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match="do not divide"):
            comm.alltoall(torch.ones(comm.size + 1), name="x")
    assert comm.traffic.payload_bytes == before


@contract
def nodes_hold_every_rank_once(comm: Communicator) -> None:
    """Divided twice: the second time the groups are there already, and must not be taken for each other."""
    for turn in range(2):
        before = comm.traffic.payload_bytes
        nodes = comm.divide()
        local, across = nodes.local, nodes.across
        assert (across is not None) == (local.rank == 0), "the first rank of a node is the one across"
        # Everybody's node, told by the number of its first rank: through the node's own communicator.
        first = local.broadcast(torch.tensor(comm.rank), 0, name="first").wait().reshape(1)
        firsts = comm.allgather(first, name="firsts").wait().tolist()
        here = [rank for rank in range(comm.size) if firsts[rank] == firsts[comm.rank]]
        assert local.size == len(here)
        ranks = local.allgather(torch.tensor([comm.rank]), name="ranks").wait()
        assert ranks.tolist() == here, "in rank order"
        assert nodes.count == len(set(firsts))
        if across is not None:
            gathered = across.allgather(torch.tensor([comm.rank]), name="ranks").wait()
            assert gathered.tolist() == sorted(set(firsts))
            assert across.rank == sorted(set(firsts)).index(comm.rank)
        if turn:
            local.close()
        assert local.traffic.payload_bytes == 8 + 8 * local.size, "each counts its own"
        assert comm.traffic.payload_bytes - before == 16 * comm.size


@contract
def sums_of_nodes_are_the_sum_of_all(comm: Communicator) -> None:
    nodes = comm.divide()
    handles = [nodes.local.allreduce(torch.full((3,), comm.rank + i), name=f"a{i}") for i in range(5)]
    everybody = comm.allreduce(torch.ones(2), name="a0")  # meanwhile, and under the same name
    totals = [handle.wait() for handle in handles]
    for i, total in enumerate(totals):
        if nodes.across is not None:
            nodes.across.allreduce(total, name=f"a{i}").wait()
        nodes.local.broadcast(total, 0, name=f"b{i}").wait()
        assert total.tolist() == [sum(range(comm.size)) + i * comm.size] * 3
    assert everybody.wait().tolist() == [comm.size] * 2


@contract
def messages_of_a_duplicate_do_not_meet_those_of_the_original(comm: Communicator) -> None:
    """Half of the ranks use the duplicate first, the other half the original: in another order, under the same name."""
    try:
        other = comm.duplicate()
    except ConfigurationError as error:  # on all ranks, where the library makes groups with the whole job only
        assert comm.kind == "torch"
        assert "leaves out ranks of the job" in str(error)
        return
    assert (other.rank, other.size, other.kind, other.traffic.payload_bytes) == (comm.rank, comm.size, comm.kind, 0)
    own, again = torch.full((2,), 1 + comm.rank), torch.full((3,), 10)
    pairs = [(comm, own), (other, again)]
    handles = [by.allreduce(tensor, name="sum") for by, tensor in (pairs if comm.rank % 2 else pairs[::-1])]
    for handle in handles:
        handle.wait()
    assert own.tolist() == [sum(range(1, comm.size + 1))] * 2
    assert again.tolist() == [10 * comm.size] * 3
    assert other.traffic.payload_bytes == again.nbytes, "each counts its own"
    other.close()
    assert comm.allreduce(torch.ones(1), name="sum").wait().item() == comm.size
