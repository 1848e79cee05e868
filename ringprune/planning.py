"""What one wrapper exchanges, whole parameters or pieces of them, in which mode, and what a schedule cannot go with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.gradient_mode import GradientMode
from ringprune.mode import Parts
from ringprune.plan import ParamSpec, Plan, build_plan
from ringprune.policies import Policy
from ringprune.priority_mode import PriorityMode
from ringprune.slicing import SlicedPlan, slice_plan
from ringprune.update_mode import UpdateMode

__all__ = ["check_schedule", "make_mode", "make_plan"]


def make_plan(
    policy: Policy, specs: Sequence[ParamSpec], params: Sequence[Tensor], bucket_bytes: int, facts: Iterable[str]
) -> tuple[Plan, SlicedPlan | None]:
    """What is exchanged, and its pieces where a schedule sends slices."""
    packed = [policy.routing.packed(spec) for spec in specs]
    if policy.schedule is None:
        return build_plan(specs, packed, bucket_bytes, facts), None
    # A slice is a view of its parameter, and of its gradient, whose norm may be clipped.
    uncut = policy.clipping.norm_per_tensor is not None
    whole = [uncut or not param.is_contiguous() for param in params]
    sliced = slice_plan(specs, packed, whole, policy.schedule.slice_bytes, policy.schedule.fuse_bytes, facts)
    return sliced.plan, sliced


def check_schedule(
    policy: Policy, model: Any, named: Iterable[tuple[str, Tensor, int]], given: Mapping[str, bool]
) -> None:
    """Refuse what cannot go with a schedule that crosses the barrier between two steps.

    Args:
        policy: the policy.
        model: what was given as ``model``.
        named: the parameters that are trained, with their names.
        given: whether the wrapper was given each of the arguments in ``_REASONS``.

    Raises:
        ArgumentTypeError: ``model`` is no module.
        ConfigurationError: something cannot work; says what, why, and what to do.
    """
    if policy.schedule is None:
        return
    what = f"policy {policy.name!r} schedules the forward pass"
    if model is None:
        raise ConfigurationError(f"{what}: give the wrapper model=, the module whose parameters the optimizer has")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={model!r}: a torch.nn.Module")
    kind = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or kind == "OptimizedModule":
        raise ConfigurationError(
            f"{what}, and model is a {kind}, whose forward pass no hook can wait in: {_WAYS[kind]}"
        )
    owned = {id(param) for param in model.parameters()}
    strangers = [name for name, param, _ in named if id(param) not in owned]
    if strangers:
        raise ConfigurationError(
            f"{what}, and {len(strangers)} parameters are not in model=: {', '.join(map(repr, strangers[:5]))}; their "
            "use could not be waited for. Give the module that holds them all"
        )
    for name, why in _REASONS.items():
        if given[name]:
            raise ConfigurationError(f"{what}, which {name} cannot go with: {why}")


def make_mode(parts: Parts, statistics: Mapping[str, Tensor]) -> GradientMode | UpdateMode:
    """What exchanges under the policy; ``statistics`` are those of BatchNorm layers, averaged with local steps.

    Raises:
        ConfigurationError: updates cannot be summed.
    """
    if parts.policy.local_steps is not None:
        if not parts.settings.mean.average:
            raise ConfigurationError("op=Sum with local_steps: what the ranks' weights have moved by is averaged")
        return UpdateMode(parts, statistics)
    return GradientMode(parts) if parts.sliced is None else PriorityMode(parts)


_REASONS = {
    "scaler": "it decides on all gradients together whether a step is made; train in bfloat16, without a scaler",
    'nonfinite="skip"': "the first layers have made the step before the gradients of all ranks are known",
    "guard": "it judges whole steps",
    "hierarchical=True": "the order is agreed between ranks, and here nodes exchange",
}

_WAYS = {
    "OptimizedModule": "wrap the optimizer with the plain module, and compile parts of it",
    "DataParallel": "start one process per device",
    "DistributedDataParallel": "leave DDP away, RingPrune averages the gradients",
}
