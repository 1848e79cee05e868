"""What goes wrong on simulated ranks: everybody is told, by name, and nobody is left waiting."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringprune.comm import simulate
from ringprune.comm.simulated import SimulatedCommunicator
from ringprune.errors import CollectiveMismatchError, CommunicatorError, ConfigurationError, UsageError

Errors = dict[int, Exception]


def errors_of_all(size: int, fn: Any, timeout: float = 10.0) -> Errors:
    """Run ``fn`` on all ranks and return what each raised."""
    errors: Errors = {}

    def noting(comm: SimulatedCommunicator) -> None:
        try:
            fn(comm)
        except Exception as error:
            errors[comm.rank] = error
            raise

    with pytest.raises(Exception) as raised:
        simulate(size, noting, timeout=timeout)
    assert raised.value in errors.values()
    return errors


def test_results_come_in_rank_order() -> None:
    assert simulate(5, lambda comm: (comm.rank, comm.size, comm.kind)) == [(rank, 5, "simulated") for rank in range(5)]


def test_64_ranks() -> None:
    def total(comm: SimulatedCommunicator) -> float:
        for step in range(20):
            result = comm.allreduce(torch.full((10,), float(comm.rank)), name=f"step {step}").wait()
        return float(result[0])

    assert simulate(64, total) == [64 * 63 / 2] * 64


def test_sums_are_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]

    def total(comm: SimulatedCommunicator) -> float:
        time.sleep(0.01 * (3 - comm.rank))  # the last rank comes first
        return float(comm.allreduce(torch.tensor([values[comm.rank]]), name="a").wait())

    assert simulate(4, total) == [1.0] * 4  # (1e8 + 1) is 1e8 in float32


def test_any_dtype_is_carried() -> None:
    def check(comm: SimulatedCommunicator) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.int8):
            assert comm.allreduce(torch.ones(3, dtype=dtype), name="a").wait().tolist() == [3] * 3

    simulate(3, check)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda c: c.allreduce(torch.ones(3), name="a"), lambda c: c.broadcast(torch.ones(3), 0, name="a")),
        (lambda c: c.allreduce(torch.ones(3), name="a"), lambda c: c.allreduce(torch.ones(3), name="b")),
        (lambda c: c.allreduce(torch.ones(3), name="a"), lambda c: c.allreduce(torch.ones(4), name="a")),
        (lambda c: c.allreduce(torch.ones(3), name="a"), lambda c: c.allreduce(torch.ones(3).int(), name="a")),
        (lambda c: c.broadcast(torch.ones(3), 0, name="a"), lambda c: c.broadcast(torch.ones(3), 1, name="a")),
        (lambda c: c.allgather(torch.ones(3), name="a"), lambda c: c.allgather(torch.ones(4), name="a")),
        (lambda c: c.allgather(torch.ones(3, 1), name="a"), lambda c: c.allgather(torch.ones(3, 2), name="a")),
    ],
    ids=["kind", "name", "shape", "dtype", "root", "rows", "row shape"],
)
def test_mismatch_is_raised_on_all_ranks_and_names_both_calls(first: Any, second: Any) -> None:
    errors = errors_of_all(3, lambda comm: (second if comm.rank == 1 else first)(comm).wait())
    assert len(errors) == 3
    for error in errors.values():
        assert type(error) is CollectiveMismatchError
        assert str(error).count('called "') == 2
        assert "rank 1 called" in str(error)
    assert len({id(error) for error in errors.values()}) == 3


def test_mismatch_reaches_ranks_that_wait_for_something_else() -> None:
    def swapped(comm: SimulatedCommunicator) -> None:
        names = ["a", "b"] if comm.rank else ["b", "a"]
        handles = [comm.allreduce(torch.ones(1), name=name) for name in names]
        handles[1].wait()

    errors = errors_of_all(4, swapped)
    assert sorted(errors) == [0, 1, 2, 3]
    assert all(isinstance(error, CollectiveMismatchError) for error in errors.values())


def test_pieces_that_do_not_fit_are_a_mismatch() -> None:
    def uneven(comm: SimulatedCommunicator) -> None:
        comm.alltoall(torch.ones(3), splits=[1, 2] if comm.rank else [2, 1], received=[2, 1], name="t").wait()

    errors = errors_of_all(2, uneven)
    assert "rank 0 sends 1 rows to rank 1, which expects 2" in str(errors[0])
    assert type(errors[1]) is CollectiveMismatchError


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    failure = ValueError("boom")

    def one_fails(comm: SimulatedCommunicator) -> None:
        if comm.rank == 2:
            raise failure
        comm.allreduce(torch.ones(1200), name="bucket 3 values").wait()

    with pytest.raises(ValueError, match="boom") as raised:
        simulate(4, one_fails)
    assert raised.value is failure
    told = 'rank 2 ended with ValueError: boom while rank 0 was in "bucket 3 values" (allreduce of 1200 float32)'
    assert f"rank 0: CommunicatorError: {told}" in getattr(failure, "__notes__", [f"rank 0: CommunicatorError: {told}"])


def test_the_same_error_on_all_ranks_is_rank_0s() -> None:
    def all_fail(comm: SimulatedCommunicator) -> None:
        time.sleep(0.01 * (2 - comm.rank))
        raise ValueError(f"from {comm.rank}")

    with pytest.raises(ValueError, match="from 0"):
        simulate(3, all_fail)


def test_collectives_that_all_ranks_called_are_finished_after_a_rank_has_failed() -> None:
    results = {}

    def fails_later(comm: SimulatedCommunicator) -> None:
        handle = comm.allreduce(torch.ones(1), name="a")
        if comm.rank == 0:
            raise ValueError("boom")
        results[comm.rank] = handle.wait().item()

    with pytest.raises(ValueError, match="boom"):
        simulate(3, fails_later)
    assert results == {1: 3.0, 2: 3.0}


def test_a_rank_that_returns_early_is_named() -> None:
    errors = errors_of_all(3, lambda comm: comm.rank == 1 or comm.broadcast(torch.ones(2), 1, name="b").wait())
    assert sorted(errors) == [0, 2]
    assert str(errors[2]) == 'rank 1 returned while rank 2 was in "b" (broadcast from rank 1 of 2 float32)'


def test_a_call_that_nobody_waits_for_is_missed_too() -> None:
    with pytest.raises(CommunicatorError, match=r'called "a" \(allreduce of 1 float32\), which rank 1 never did'):
        simulate(2, lambda comm: comm.rank == 1 or comm.allreduce(torch.ones(1), name="a"))


def test_the_time_limit_names_who_waits_and_who_never_came() -> None:
    released = threading.Event()
    late: list[bool] = []

    def one_is_stuck(comm: SimulatedCommunicator) -> None:
        if comm.rank == 1:
            late.append(released.wait(60))
        comm.allreduce(torch.ones(3), name="a").wait()

    errors = errors_of_all(3, one_is_stuck, timeout=1.0)  # within which the others come, on a busy machine too
    assert not late, "nobody waited until it was released"
    released.set()
    assert sorted(errors) == [0, 2]
    for error in errors.values():
        assert str(error).startswith('time limit of 1.0 s: waiting in "a" (allreduce of 3 float32): ')
        assert str(error).endswith("rank 1 never came, it is in no collective")


def test_exit_is_raised_in_the_caller() -> None:
    with pytest.raises(SystemExit, match="7"):
        simulate(2, lambda comm: (_ for _ in ()).throw(SystemExit(7)))


def test_tensors_are_written_in_wait_not_before() -> None:
    def check(comm: SimulatedCommunicator) -> None:
        tensor = torch.full((2,), float(comm.rank))
        handle = comm.allreduce(tensor, name="a")
        comm.allreduce(torch.ones(1), name="all have called").wait()
        assert tensor.tolist() == [comm.rank] * 2
        assert handle.wait().tolist() == [3.0] * 2

    simulate(3, check)


def test_after_close_calls_are_refused() -> None:
    def check(comm: SimulatedCommunicator) -> None:
        comm.close()
        comm.close()
        with pytest.raises(UsageError, match='allreduce "a": this communicator has been closed'):
            comm.allreduce(torch.ones(1), name="a")

    simulate(2, check)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="world_size is 0"):
        simulate(0, lambda comm: None)


def test_ranks_of_a_node_hear_of_one_that_ends() -> None:
    def fn(comm: SimulatedCommunicator) -> None:
        local = comm.divide().local
        if comm.rank == 3:
            raise ValueError("boom")
        local.allreduce(torch.ones(1), name="of the node").wait()

    with pytest.raises(ValueError, match="boom"):
        simulate(4, fn, timeout=10, ranks_per_node=2)


def test_a_rank_that_waits_in_another_group_is_found() -> None:
    def fn(comm: SimulatedCommunicator) -> None:
        local = comm.divide().local
        where = comm if comm.rank == 1 else local
        where.allreduce(torch.ones(1), name="all" if comm.rank == 1 else "node").wait()

    with pytest.raises(CommunicatorError) as raised:
        simulate(2, fn, timeout=1.0)
    assert "never came, it is waiting in" in str(raised.value)


def test_nodes_hold_at_least_one_rank() -> None:
    with pytest.raises(ConfigurationError, match="ranks_per_node is 0"):
        simulate(2, lambda comm: None, ranks_per_node=0)


def test_one_at_a_time_gives_the_same_and_never_two_at_once() -> None:
    """A rank that waits lets the others go on, so nothing hangs; sums are the same bytes."""
    computing, most = [0], [0]

    def rank(comm: SimulatedCommunicator) -> torch.Tensor:
        total = torch.zeros(4)
        for step in range(5):
            computing[0] += 1
            most[0] = max(most[0], computing[0])
            time.sleep(0.001)  # lets another thread run, if it may
            value = torch.full((4,), 0.1 * (comm.rank + step))
            computing[0] -= 1
            total += comm.allreduce(value, name=f"step {step}").wait()
        return total

    alone = simulate(4, rank, one_at_a_time=True)
    assert most[0] == 1
    together = simulate(4, rank)
    assert all(torch.equal(a, together[0]) for a in (*alone, *together))


def test_one_at_a_time_a_rank_that_fails_frees_the_others() -> None:
    def rank(comm: SimulatedCommunicator) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 fails")
        comm.allreduce(torch.zeros(1), name="sum").wait()

    with pytest.raises(ValueError, match="rank 1 fails"):
        simulate(3, rank, one_at_a_time=True)


def test_hooks_of_a_rank_run_in_its_own_thread() -> None:
    """Backward of CUDA tensors calls all ranks' hooks in one thread otherwise: one waited there for another's turn."""
    # What is no longer multithreaded runs in the thread that calls backward(), on any device.
    assert simulate(2, lambda comm: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """What runs in the background of a shell inherits that SIGINT is ignored, and these tests may."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_threads_have_ended_when_ctrl_c_is_raised() -> None:
    """One that was computing as the interpreter exited aborted the process."""

    def rank(comm: SimulatedCommunicator) -> None:
        if comm.rank == 0:
            signal.raise_signal(signal.SIGINT)
        for step in range(100):
            time.sleep(0.3)  # computes
            comm.allreduce(torch.ones(1), name=str(step)).wait()

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        simulate(2, rank)
    assert set(threading.enumerate()) <= before
