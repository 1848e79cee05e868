"""A training run with the same bits on every device: no sums over entries, factors that are powers of two.

For tests on a GPU, with pytest alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import ringprune as rp

LIMIT = 60.0
"""Seconds that a rank waits for another."""


class Pull(nn.Module):
    """Weights that are drawn to targets, entry by entry: the gradient is half the distance.

    Args:
        shape: of the weights.
        rank: whose targets.
        seed: the layer's.
    """

    def __init__(self, shape: tuple[int, ...], rank: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(shape, generator=draw))
        draw = torch.Generator().manual_seed(1_000 * (rank + 1) + seed)
        self.target: Tensor
        self.register_buffer("target", torch.randn(shape, generator=draw), persistent=False)

    def forward(self, total: Tensor) -> Tensor:
        return total + (self.weight - self.target).square().sum(dtype=torch.float32) * 0.25


def pulls(rank: int, device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two matrices that are sent packed and a vector that is not."""
    shapes: list[tuple[int, ...]] = [(64, 64), (48, 64), (70,)]
    return nn.Sequential(*(Pull(shape, rank, i) for i, shape in enumerate(shapes))).to(device, dtype)


def halving(params: Iterable[Tensor], **options: Any) -> torch.optim.SGD:
    """Products by powers of two are exact, so that a fused multiply-add changes no bit."""
    return torch.optim.SGD(params, **{"lr": 0.125, "momentum": 0.5} | options)


def wrapped(
    model: nn.Module, comm: rp.comm.Communicator, policy: Any, make: Callable[..., Any] = halving, **options: Any
) -> Any:
    if getattr(policy, "schedule", None) is not None:
        options["model"] = model
    return rp.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), policy=policy, comm=comm, **options
    )


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.zeros((), device=next(model.parameters()).device))
    return loss


def advance(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """As bytes, in host memory: NaN and the sign of zero count."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: bits(param) for name, param in model.named_parameters()}


def kept(optimizer: Any) -> dict[str, Tensor]:
    """The bits of what a rank keeps of each parameter."""
    state = optimizer.state_dict()["ringprune"]["parameters"]
    return {f"{name} {kind}": bits(t) for name, kinds in state.items() for kind, t in kinds.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what has other bits, or is in one alone."""
    return [
        name for name in {**one, **other} if name not in one or name not in other or not one[name].equal(other[name])
    ]
