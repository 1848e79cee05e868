"""Parameters that autograd has left with one gradient, as those that are added to each other: steps are as without."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringprune as rp
from ringprune.memory import overlapping
from tests.training import nesterov, sgd

STEPS = 5


class Added(nn.Module):
    """A layer whose matrix is the sum of two parameters, and whose bias is, each of them in another layout."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(0.1 * torch.randn(64, 48, generator=draw)) for _ in range(2))
        self.c, self.d = (nn.Parameter(0.1 * torch.randn(48, generator=draw)) for _ in range(2))
        self._apart = apart

    def _sum(self, one: Tensor, other: Tensor) -> Tensor:
        # A product has a gradient of its own.
        return one.view(-1) + (1.0 * other if self._apart else other).view(-1)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self._sum(self.a, self.b).view(64, 48) + self._sum(self.c, self.d)).square().mean()


def wrapped(model: Added, comm: rp.comm.Communicator, policy: rp.Policy, make: Any, **options: Any) -> Any:
    return rp.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), policy=policy, comm=comm, model=model, **options
    )


def backward(model: Added, rank: int, step: int) -> None:
    model(torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * rank + step))).backward()


SETTINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one bucket": (rp.IWP(0.05, min_numel=1), sgd, {}),
    "a bucket each": (rp.IWP(0.05, min_numel=1), nesterov, {"bucket_bytes": 1}),
    "afterwards": (rp.IWP(0.05, clip_norm=0.5), sgd, {"overlap": False}),
    "dense": (rp.Dense(), sgd, {}),
    "16 bits": (rp.IWP(0.05, values="bf16", dense_values="bf16"), sgd, {}),
    "gathered": (rp.DGC(0.05), sgd, {"bucket_bytes": 1}),
    "in layers": (rp.P3(), sgd, {}),
    "local steps": (rp.IWP(0.3, local_steps=2, clip_norm_per_tensor=0.01), sgd, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_shared_gradient_is_as_two(setting: str) -> None:
    """Averages of one were written over the other's: it stepped with those, what it had sent itself was lost."""
    policy, make, options = SETTINGS[setting]

    def rank(comm: rp.comm.Communicator, *, apart: bool) -> list[Tensor]:
        model = Added(apart=apart)
        optimizer = wrapped(model, comm, policy, make, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            shared = [p.grad.data_ptr() == q.grad.data_ptr() for p, q in ((model.a, model.b), (model.c, model.d))]
            assert shared == [not apart] * 2, "as this test needs it"
            optimizer.step()
        optimizer.flush()
        return [param.detach().clone() for param in model.parameters()]

    apart, together = (rp.simulate(2, lambda comm, a=a: rank(comm, apart=a))[0] for a in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))


def test_a_loss_scale_is_taken_off_once() -> None:
    """With local steps a gradient of two parameters was divided by the scale twice."""

    def rank(comm: rp.comm.Communicator, *, apart: bool) -> list[Tensor]:
        model, scaler = Added(apart=apart), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = wrapped(model, comm, rp.Dense(local_steps=2), sgd, scaler=scaler)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * comm.rank + step))
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach().clone() for param in model.parameters()]

    apart, together = (rp.simulate(2, lambda comm, a=a: rank(comm, apart=a))[0] for a in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))


def test_what_overlaps() -> None:
    flat = torch.zeros(100)
    other, none = torch.zeros(10), torch.empty(0)
    rows = torch.zeros(3, 4).to_sparse(1)
    assert overlapping([flat[:50], flat[50:], other, none, none, rows, rows]) == []
    assert overlapping([flat[40:60], flat[:50], other, flat[60:]]) == [0]
    assert sorted(overlapping([flat, flat[10:20], other, flat[90:]])) == [1, 3]
    assert len(overlapping([flat, flat, other])) == 1
    assert overlapping([flat[:10], flat[10:10], flat[5:5]]) == []
