"""The buckets of DistributedDataParallel as those of a Plan."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringprune.arguments import describe_parameters
from ringprune.plan import Bucket, ParamSpec, Plan, Route, make_bucket
from ringprune.policies import Policy

__all__ = ["plan_of_ddp"]


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
