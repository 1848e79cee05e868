"""Messages go on while a backward pass computes, and not only when another bucket is full."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.exchange import exchange
from tests.training import wrap


class InBackward(torch.autograd.Function):
    """Calls something when a backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return grads[0], None


class Layers(nn.Module):
    """Of four layers the last two fill a bucket each; the first two share one, which is full at the end."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(40, 40), (40, 40), (40, 80), (80, 40)]
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in sizes)
        for param in self.parameters():
            nn.init.constant_(param, 0.01)

    def forward(self, x: Tensor, at_first: Callable[[], object], after_two: Callable[[], object]) -> Tensor:
        first, second, third, fourth = self.layers
        return InBackward.apply(fourth(third(InBackward.apply(second(first(x)), after_two))), at_first).sum()


@pytest.mark.parametrize(
    ("policy", "message"),
    [(rp.Dense("bf16"), "allgather"), (rp.IWP(0.1, min_numel=1), "allreduce")],
    ids=["coded", "agreed"],
)
def test_what_waits_for_a_late_rank_goes_on_as_soon_as_that_has_come(
    policy: rp.Policy, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until the next bucket was full, and over MPI what was under way stood still meanwhile."""
    monkeypatch.setattr(exchange, "ASKED_EVERY", 0.0)
    two_here, two_there = threading.Event(), threading.Event()

    def rank(comm: Communicator) -> None:
        model, sent, seen = Layers(), list[str](), list[str]()
        optimizer = wrap(model, comm, policy, bucket_bytes=4 * 3200)
        send = getattr(comm, message)

        def noted(*args: Any, **kwargs: Any) -> Any:
            sent.append(message)
            return send(*args, **kwargs)

        def at_first() -> None:
            if comm.rank == 1:
                assert two_here.wait(30)

        def after_two() -> None:
            (two_here if comm.rank == 0 else two_there).set()
            if comm.rank == 0:
                assert not sent, "rank 1 had not sent anything yet"
                assert two_there.wait(30)

        x = torch.ones(2, 40)
        model(x, int, int).backward()
        optimizer.step()
        optimizer.zero_grad()
        setattr(comm, message, noted)
        loss = model(x, at_first, after_two)
        model.layers[0].weight.register_hook(lambda grad: seen.extend(sent))
        loss.backward()
        optimizer.step()
        assert message in seen

    rp.simulate(2, rank, timeout=30)
