"""The queue of what is ready, slices of tensors, and the order that all ranks carry out alike."""

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringprune as rp
from ringprune.arguments import describe_parameters
from ringprune.comm.communicator import Communicator
from ringprune.exchange import Exchange
from ringprune.exchange.dispatch import Dispatch
from ringprune.metrics import Metrics
from ringprune.plan import ParamSpec, build_plan
from ringprune.reduction import Mean
from ringprune.residual import Correction
from ringprune.schedule import LayerPriority, Queue
from ringprune.slicing import slice_plan

CPU = torch.device("cpu")


def test_a_late_urgent_item_overtakes_what_waits_and_not_what_is_under_way() -> None:
    queue = Queue(credit=10)
    for item in (5, 4, 3):
        queue.push(item, priority=item, nbytes=6)
    assert queue.pop() == 3
    assert queue.pop() is None  # 12 bytes would be outstanding
    queue.push(0, priority=0, nbytes=6)
    queue.give_back(3)
    assert [queue.pop(), queue.pop()] == [0, None]
    queue.give_back(0)
    assert queue.pop() == 4


def test_what_is_larger_than_the_credit_goes_alone() -> None:
    queue = Queue(credit=10)
    queue.push(0, priority=0, nbytes=100)
    queue.push(1, priority=1, nbytes=1)
    assert queue.pop() == 0
    assert queue.pop() is None
    queue.give_back(0)
    assert queue.pop() == 1


@given(st.data(), st.integers(1, 50))
def test_outstanding_bytes_stay_within_the_credit_and_everything_leaves_by_priority(
    data: st.DataObject, credit: int
) -> None:
    queue, under_way, popped, sizes = Queue(credit), [], [], {}
    items = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=20))
    waiting = dict(enumerate(items))
    ready: dict[int, int] = {}
    while waiting or ready or under_way:
        choice = data.draw(st.sampled_from(["push", "pop", "give back"]))
        if choice == "push" and waiting:
            item, (priority, nbytes) = waiting.popitem()
            queue.push(item, priority=priority, nbytes=nbytes)
            ready[item], sizes[item] = priority, nbytes
        elif choice == "give back" and under_way:
            queue.give_back(under_way.pop(0))
        elif (item := queue.pop()) is not None:
            assert (ready[item], item) == min((p, i) for i, p in ready.items())
            del ready[item]
            under_way.append(item)
            popped.append(item)
            assert queue.outstanding <= credit or len(under_way) == 1
        elif ready:
            assert under_way, "nothing is under way, and the queue gives nothing"
            queue.give_back(under_way.pop(0))
    assert sorted(popped) == list(range(len(items)))


shapes = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(shapes, st.integers(4, 9000), st.integers(0, 9000), st.data())
def test_slices_cover_every_parameter_once_and_stay_within_their_bounds(
    numels: list[int], slice_bytes: int, fuse_bytes: int, data: st.DataObject
) -> None:
    specs = [ParamSpec(f"p{i}", (n,), torch.float32, CPU, 0) for i, n in enumerate(numels)]
    flags = st.lists(st.booleans(), min_size=len(specs), max_size=len(specs))
    packed, whole = data.draw(flags), data.draw(flags)
    sliced = slice_plan(specs, packed, whole, slice_bytes, fuse_bytes, [])
    for number, spec in enumerate(specs):
        parts = [(p.start, p.end) for p in sliced.pieces if p.param == number]
        ends = [0, *(end for _, end in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == spec.numel
        cut = not packed[number] and not whole[number]
        assert len(parts) == (max(1, -(-spec.numel // (slice_bytes // 4))) if cut else 1)
    assert sorted(i for bucket in sliced.plan.buckets for i in bucket.members) == list(range(len(sliced.pieces)))
    for bucket in sliced.plan.buckets:
        assert len({packed[sliced.pieces[i].param] for i in bucket.members}) == 1
        assert 4 * bucket.numel <= max(fuse_bytes, 4 * max(bucket.numels)), "more was put together than asked for"


class Over:
    """A message that is there."""

    def done(self) -> bool:
        return True


class FakeExchange:
    """Buckets of one message each, over a real communicator; notes what was started and how much was outstanding."""

    def __init__(self, comm: Communicator, nbytes: Sequence[int], turns: Sequence[int]) -> None:
        self.comm, self.nbytes, self.turns = comm, nbytes, list(turns)
        self.handles: dict[int, rp.comm.communicator.Handle] = {}
        self.started: list[int] = []
        self.largest = 0

    def done(self, index: int) -> bool:
        return index not in self.handles or self.handles[index].done()

    def advance(self, index: int) -> bool:
        if index in self.handles:
            self.handles[index].wait()
        else:
            self.started.append(index)
            outstanding = [i for i in self.started if i == index or not self.handles[i].done()]
            self.largest = max(self.largest, sum(self.nbytes[i] for i in outstanding))
        self.turns[index] -= 1
        self.handles[index] = self.comm.allreduce(torch.ones(1), name=f"bucket {index} turn {self.turns[index]}")
        return self.turns[index] > 0

    def reduced(self, index: int) -> bool:
        return self.handles[index].done()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(data=st.data())
def test_all_ranks_start_the_same_messages_in_the_same_order_whatever_is_ready_when(
    ranks: int, data: st.DataObject
) -> None:
    """Ranks whose gradients come in different orders: the simulated communicator refuses calls that do not match."""
    count = data.draw(st.integers(1, 6))
    nbytes = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    turns = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    comes = [data.draw(st.permutations(range(count))) for _ in range(ranks)]
    credit = data.draw(st.integers(1, 20))

    def rank(comm: Communicator) -> tuple[list[int], int]:
        exchange = FakeExchange(comm, nbytes, turns)
        metrics = Metrics(comm.traffic, 1)
        dispatch = Dispatch(comm, exchange, metrics, LayerPriority(4, credit, 0), nbytes)
        for _ in range(2):
            exchange.turns, exchange.handles = list(turns), {}
            exchange.started.clear()
            last: list[bool] = []
            dispatch.begin(list(range(count)), lambda last=last: last.append(True) or Over())
            for index in comes[comm.rank]:
                dispatch.ready(index)
                while dispatch.progress():
                    pass
            while dispatch.progress():
                pass
            assert not last, "it is not sealed yet"
            dispatch.seal()
            while not dispatch.idle:
                dispatch.progress(wait=True)
            assert last == [True]
            assert dispatch.sent == set(range(count))
        return list(exchange.started), exchange.largest

    results = rp.simulate(ranks, rank, timeout=20)
    assert {tuple(started) for started, _ in results} == {tuple(results[0][0])}
    assert sorted(results[0][0]) == list(range(count))


def test_with_one_rank_ready_buckets_leave_by_priority_within_the_credit() -> None:
    def rank(comm: Communicator) -> list[int]:
        exchange = FakeExchange(comm, [4, 4, 4], [1, 1, 1])
        slow = {1: False}
        done = exchange.reduced
        exchange.reduced = lambda index: slow.get(index, True) and done(index)
        dispatch = Dispatch(comm, exchange, Metrics(comm.traffic, 1), LayerPriority(4, 4, 0), [4, 4, 4])
        dispatch.begin([2, 1, 0], Over)
        dispatch.ready(1)
        while dispatch.progress():
            pass
        for index in (0, 2):
            dispatch.ready(index)
            while dispatch.progress():
                pass
        assert exchange.started == [1], "the credit was used up by bucket 1"
        slow[1] = True
        while dispatch.progress():
            pass
        return exchange.started

    assert rp.simulate(1, rank) == [[1, 2, 0]]


@pytest.mark.parametrize(
    "policy",
    [
        rp.IWP(0.05),
        rp.DGC(0.05),
        rp.DGC(0.05, index_sets="scattered"),
        rp.OkTopk(0.05),
        rp.SlimDP(0.05, explore_by="rank", refresh=1),
    ],
    ids=["iwp", "gathered", "scattered", "balanced", "exploring"],
)
def test_a_bucket_is_reduced_when_its_last_message_is_there(policy: rp.policies.Policy) -> None:
    """Sparse sums were taken for done as soon as they were under way, so more than the credit was outstanding."""
    late = threading.Event()

    def rank(comm: Communicator) -> None:
        weight = torch.linspace(1, 2, 4096).view(64, 64)
        plan = build_plan(describe_parameters([("weight", torch.nn.Parameter(weight), 0)]), [True], 2**20, [])
        exchange = Exchange(
            plan,
            policy,
            comm,
            Metrics(comm.traffic, plan.numel),
            [weight],
            seed=0,
            mean=Mean(),
            velocity=False,
            spare=False,
        )
        turns = 0
        for step in range(2):
            exchange.begin()
            exchange.start_alone(0, [weight + comm.rank], Correction([1.0], [0.0], [False]))
            if step == 0:
                while exchange.advance(0):
                    turns += 1
            else:
                for _ in range(turns):
                    assert exchange.advance(0)
                if comm.rank == 1:
                    assert late.wait(20)
                assert not exchange.advance(0)
                if comm.rank == 0:
                    assert not exchange.reduced(0), "the other rank has not sent its last message"
                    late.set()
            exchange.finish([torch.empty(64, 64)])

    rp.simulate(2, rank, timeout=30)


@pytest.mark.parametrize("wrong", [{"slice_bytes": 3}, {"credit_bytes": 0}, {"fuse_bytes": -1}])
def test_bounds_that_cannot_work_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(rp.ConfigurationError, match=next(iter(wrong))):
        LayerPriority(**wrong)
