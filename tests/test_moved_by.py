"""What local steps have moved parameters by: it takes their memory, and is the same whatever that looks like."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.errors import CommunicatorError, UsageError
from ringprune.local_steps import moved_by
from tests.places import PLACES


def laid_out(numel: int, kind: str, memory: Tensor) -> Tensor:
    """A parameter of one of many looks; those that overlap are all parts of ``memory``."""
    if kind == "overlaps":
        return memory[:numel]
    if kind == "overlaps behind":
        return memory[1 : 1 + numel]
    if kind == "strided":
        return torch.randn(numel, 2)[:, 0]
    return torch.randn(numel, dtype=getattr(torch, kind))


KINDS = ["float32", "float64", "bfloat16", "strided", "overlaps", "overlaps behind"]


@pytest.mark.parametrize("place", PLACES)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(KINDS)), max_size=8))
def test_it_is_the_difference_wherever_it_is_written(place: str, given: list[tuple[int, str]]) -> None:
    memory = torch.randn(6, device=place)
    params = [laid_out(numel, kind, memory).to(place) for numel, kind in given]
    shared = [torch.randn(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=place) for p in params]
    wanted = [w.to(p.dtype).to(w.dtype) - p for w, p in zip(shared, params, strict=True)]
    moved = moved_by(shared, params)
    for found, expected in zip(moved, wanted, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_it_takes_no_memory_of_its_own_for_parameters_as_they_mostly_are() -> None:
    params = [torch.randn(3, 4), torch.randn(5)]
    moved = moved_by([torch.zeros_like(param) for param in params], params)
    assert [tensor.data_ptr() for tensor in moved] == [param.data_ptr() for param in params]


def test_what_other_processes_read_stays_as_it_is() -> None:
    """An actor or evaluator that has the model in shared memory never finds differences there."""
    param, weight = torch.ones(3).share_memory_(), torch.full((3,), 3.0)
    (moved,) = moved_by([weight], [param])
    assert moved.tolist() == [2.0] * 3
    assert param.tolist() == [1.0] * 3


def test_nothing_is_made_of_parameters_in_the_middle_of_an_exchange() -> None:
    """A signal's handler may run anywhere; differences became the shared weights there."""

    def rank(comm: Communicator) -> None:
        model = nn.Linear(40, 60)
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            policy=rp.IWP(0.1, min_numel=1, local_steps=1),
            comm=comm,
        )
        allreduce, asked = comm.allreduce, []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            with pytest.raises(UsageError, match="set a flag"), optimizer.shared_weights():
                asked.append("entered")
            asked.append("refused")
            return allreduce(*args, **kwargs)

        model(torch.ones(2, 40)).sum().backward()
        comm.allreduce = interrupted  # type: ignore[method-assign]
        optimizer.step()
        assert set(asked) == {"refused"}
        with optimizer.shared_weights():
            assert all(bool((param > 0.2).all()) for param in model.parameters())

    rp.simulate(2, rank)


def test_parameters_are_the_shared_weights_where_an_exchange_breaks_off() -> None:
    """They hold differences by then, which no rank must train on."""

    def rank(comm: Communicator) -> None:
        model = nn.Linear(40, 60)
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
        optimizer = rp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            policy=rp.IWP(0.1, min_numel=1, local_steps=1),
            comm=comm,
        )
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        before = [param.detach().clone() for param in model.parameters()]
        comm.allreduce = broken  # type: ignore[method-assign]
        model(torch.ones(2, 40)).sum().backward()
        with pytest.raises(CommunicatorError, match="unplugged"):
            optimizer.step()
        for param, weight in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, weight)

    rp.simulate(2, rank)


def broken(*args: object, **kwargs: object) -> None:
    """A communicator of which nothing is left."""
    raise CommunicatorError("unplugged")
