"""What begins while a backward pass computes: messages go on, and weights may be other ones for the time being."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.comm.communicator import Communicator
from ringprune.exchange import exchange
from tests.training import batches, loss_of, make_model, same_bytes, sgd, weights, wrap


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


def wrapped(model: nn.Module, comm: Communicator, policy: rp.Policy, **options: Any) -> rp.DistributedOptimizer:
    named = model.named_parameters()
    return rp.DistributedOptimizer(sgd(model.parameters()), named, policy=policy, comm=comm, model=model, **options)


def against_an_adversary(comm: Communicator, policy: rp.Policy, without: int, **options: Any) -> Tensor:
    """Weights that a pass is made with are each rank's own, and put back before the step; one has no first batch."""
    model = make_model()
    optimizer = wrapped(model, comm, policy, **options)
    for step, batch in enumerate(batches(comm.rank, 4)):
        optimizer.zero_grad()
        if step and policy.schedule is not None:
            optimizer.synchronize()
        before = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * (1 + comm.rank))
        if step or comm.rank != without:
            loss_of(model, batch).backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), before, strict=True):
                param.copy_(value)
        optimizer.step()
    with optimizer.shared_weights():
        return weights(model)


@pytest.mark.parametrize("without", [2, 1], ids=["", "one without a batch"])
@pytest.mark.parametrize("policy", [rp.Dense(), rp.IWP(1.0), rp.P3()], ids=["dense", "iwp", "p3"])
def test_weights_may_differ_during_the_first_backward_pass(policy: rp.Policy, without: int) -> None:
    """Training on adversarial examples ended in the first step: "other weights on rank 1 than on rank 0"."""
    plain = rp.Dense() if policy.schedule is not None else policy  # a schedule changes no bit
    expected = rp.simulate(2, lambda comm: against_an_adversary(comm, plain, without, overlap=False), timeout=30)
    got = rp.simulate(2, lambda comm: against_an_adversary(comm, policy, without), timeout=30)
    assert same_bytes(*got)
    assert same_bytes(got[0], expected[0])


@pytest.mark.parametrize("policy", [rp.Dense(), rp.P3()], ids=["dense", "p3"])
@pytest.mark.parametrize("without", [0, 1])
def test_weights_that_differ_after_it_are_told_to_a_rank_without_a_batch_too(policy: rp.Policy, without: int) -> None:
    def rank(comm: Communicator) -> None:
        model = make_model(seed=comm.rank)
        optimizer = wrapped(model, comm, policy)
        for _ in range(2):
            if comm.rank != without:
                loss_of(model, next(batches(comm.rank, 1))).backward()
            with pytest.raises(rp.RankMismatchError, match=r"'0.weight' has other weights on rank 1"):
                optimizer.step()

    rp.simulate(2, rank, timeout=30)
