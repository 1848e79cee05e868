"""The buckets of DistributedDataParallel, and these as those of a Plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringprune.arguments import describe_parameters
from ringprune.plan import Bucket, ParamSpec, Plan, Route, make_bucket
from ringprune.policies import Policy

__all__ = ["Arrived", "in_order", "plan_of_ddp"]


@dataclass
class Arrived:
    """One of DDP's buckets in this backward pass."""

    buffer: Tensor
    params: list[Tensor]
    grads: list[Tensor]

    def __post_init__(self) -> None:
        # Of a GPU's who waits for it comes after this stream.
        devices: list[Any] | None = [self.buffer.device] if self.buffer.is_cuda else None
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

    @property
    def layout(self) -> tuple[int, ...]:
        """Which parameters, in which order."""
        return tuple(map(id, self.params))


def in_order(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient as a view whose entries match the parameter's.

    DDP gives a gradient the parameter's shape, but its entries lie as the parameter's do in memory (channels last).
    """
    by_stride = sorted(range(param.dim()), key=param.stride, reverse=True)
    if param.is_contiguous() or not param.permute(by_stride).is_contiguous():
        return grad
    return grad.as_strided(param.shape, param.stride())


def plan_of_ddp(
    layout: Sequence[Sequence[Tensor]], names: dict[int, str], policy: Policy, facts: Sequence[str]
) -> tuple[Plan, list[list[Bucket]]]:
    """A Plan of DDP's buckets, and which of its own each of them becomes.

    Args:
        layout: the parameters of each of DDP's buckets, in DDP's order.
        names: of parameters, by ``id``; those that have none get one here.
        policy: which of them travel packed.
        facts: what else must be equal on every rank.
    """
    for bucket, param in ((i, param) for i, params in enumerate(layout) for param in params):
        names.setdefault(id(param), f"parameter {len(names)} of bucket {bucket}")
    named = [(names[id(param)], param, 0) for params in layout for param in params]
    specs = describe_parameters(named)  # DDP has seen to it that they are alike on all ranks, and so are errors
    groups = _split(specs, [len(params) for params in layout], policy)
    buckets = tuple(bucket for group in groups for bucket in group)
    lines = [*facts, *(f"parameter {i} is {spec}" for i, spec in enumerate(specs))]
    lines += [f"bucket {bucket.index} is {bucket.route}: parameters {bucket.members}" for bucket in buckets]
    return Plan(tuple(specs), buckets, tuple(lines)), groups


def _split(specs: Sequence[ParamSpec], counts: Sequence[int], policy: Policy) -> list[list[Bucket]]:
    """For each of DDP's buckets the Plan's: what travels packed, then what travels dense, each of one dtype."""
    groups: list[list[Bucket]] = []
    first = index = 0
    for count in counts:
        own: dict[tuple[Route, torch.dtype], list[int]] = {}
        for i in range(first, first + count):
            route: Route = "packed" if policy.routing.packed(specs[i]) else "dense"
            own.setdefault((route, specs[i].dtype), []).append(i)
        first += count
        groups.append([])
        for (route, _), members in sorted(own.items(), key=lambda item: item[0][0] == "dense"):
            groups[-1].append(make_bucket(index, route, members, specs))
            index += 1
    return groups
