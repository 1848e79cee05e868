"""A small training run that every rank can make: model, data and loop, without torch's global random generator.

The ranks of the simulated communicator are threads that share that generator, so nothing here draws from it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import ringprune as rp

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def nesterov(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


def decayed(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2)


def maximize(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-2, maximize=True)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, weight_decay=1e-2)


def adamw(params: Any) -> torch.optim.Optimizer:
    # A large eps keeps the step a Lipschitz function of the gradient, so that rounding has a bound.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2, weight_decay=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {f.__name__: f for f in (sgd, nesterov, decayed, maximize, plain_sgd, adamw)}


class FailingSGD(torch.optim.SGD):
    """One whose step raises ``error``, where there is one."""

    error: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        return super().step(closure)


def make_model(seed: int = 0) -> nn.Module:
    """Two packed matrices (4,096 and 3,072 entries), one small one, biases."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def batches(rank: int, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's batches; batch i is the same whatever batches were drawn before."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        yield torch.randn(16, 64, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def wrap(
    model: nn.Module, comm: rp.comm.Communicator, policy: Any, make: MakeOptimizer = sgd, **options: Any
) -> rp.DistributedOptimizer:
    return rp.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters(), policy=policy, comm=comm, **options
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def run(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, start: int = 0) -> None:
    for batch in batches(rank, steps, start):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """All parameters in one flat copy."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).clone()


def train(
    comm: rp.comm.Communicator, policy: Any, make: MakeOptimizer = sgd, steps: int = 20, **options: Any
) -> tuple[Tensor, rp.DistributedOptimizer]:
    model = make_model()
    optimizer = wrap(model, comm, policy, make, **options)
    run(model, optimizer, comm.rank, steps)
    return weights(model), optimizer


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _raw(a) == _raw(b)


def _raw(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().numpy().tobytes())
