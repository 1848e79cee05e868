"""What one wrapper exchanges, whole parameters or pieces of them, in which mode, and what a schedule cannot go with."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringprune.arguments import DENSE_ONLY
from ringprune.comm.communicator import Communicator
from ringprune.embedding import ShardedEmbedding, embedding_of
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.gradient_mode import GradientMode
from ringprune.momentum import takes_over
from ringprune.parts import Parts
from ringprune.plan import ParamSpec, Plan
from ringprune.policies import Policy
from ringprune.priority_mode import PriorityMode
from ringprune.routing import plan_of
from ringprune.sharded_state import take_shares
from ringprune.slicing import SlicedPlan, slice_plan
from ringprune.update_mode import UpdateMode

__all__ = ["check_schedule", "make_mode", "make_plan", "sparse_parameters", "takes_groups"]

DECAY_DENSE = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that take sparse gradients, but no weight decay with them."""

_log = logging.getLogger("ringprune")


def takes_groups(comm: Communicator, *, hierarchical: bool, scaled: bool) -> bool:
    """Whether the library sums groups of tensors where they are.

    Inside nodes a bucket is one message; gradients of a scaled loss are copied to be divided.
    """
    return "group" in comm.abilities and not hierarchical and not scaled


def make_plan(
    policy: Policy,
    specs: Sequence[ParamSpec],
    params: Sequence[Tensor],
    bucket_bytes: int,
    facts: Iterable[str],
    *,
    groups: bool,
) -> tuple[Plan, SlicedPlan | None]:
    """What is exchanged, and its pieces where a schedule sends slices; see :func:`takes_groups`."""
    if policy.schedule is None:
        return plan_of(policy.routing, specs, bucket_bytes, facts, groups=groups and policy.dense_as_is), None
    packed = [policy.routing.packed(spec) for spec in specs]
    # A slice is a view of its parameter, and of its gradient, whose norm may be clipped.
    uncut = policy.clipping.norm_per_tensor is not None
    whole = [uncut or not param.is_contiguous() for param in params]
    sliced = slice_plan(specs, packed, whole, policy.schedule.slice_bytes, policy.schedule.fuse_bytes, facts)
    return sliced.plan, sliced


def sparse_parameters(policy: Policy, model: Any, optimizer: Optimizer, hierarchical: bool) -> set[int]:
    """The ids of the parameters whose gradients travel as rows: the weights of modules with ``sparse=True``.

    Raises:
        ArgumentTypeError: ``model`` is no module.
        ConfigurationError: there is no model to tell, or what was given cannot go with rows; says why.
    """
    if policy.rows is None:
        return set()
    what = f"policy {policy.name!r} exchanges rows of sparse gradients"
    if model is None:
        raise ConfigurationError(
            f"{what}: give the wrapper model=, whose modules with sparse=True tell which parameters have such"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={model!r}: a torch.nn.Module")
    if hierarchical:
        raise ConfigurationError(f"{what}, which hierarchical=True cannot go with: sums inside a node are dense")
    weights = [getattr(m, "weight", None) for m in model.modules() if getattr(m, "sparse", False) is True]
    found = {id(weight) for weight in weights if isinstance(weight, Tensor) and weight.dim() > 0}
    tables = [p for group in optimizer.param_groups for p in group["params"] if id(p) in found and p.requires_grad]
    if tables and (kind := type(optimizer).__name__) in DENSE_ONLY:
        raise ConfigurationError(
            f"{what}, and optimizer={kind} takes no sparse ones: it has {len(tables)} tables of modules with "
            f"sparse=True, such as one of shape {list(tables[0].shape)}. Give them to SparseAdam, Adagrad or SGD, in a "
            "wrapper of their own, or leave rows out"
        )
    if not takes_over(optimizer, policy.correction):  # else decay is added after the exchange
        _check_decay(optimizer, found)
    dense = [p for group in optimizer.param_groups for p in group["params"]]
    dense = [p for p in dense if id(p) not in found and embedding_of(p) is None]
    if type(optimizer).__name__ == "SparseAdam" and dense:
        raise ConfigurationError(
            f"optimizer=SparseAdam has {len(dense)} parameters, such as one of shape {list(dense[0].shape)}, that no "
            "module of model= with sparse=True has: their gradients are dense. Give those to another optimizer"
        )
    return found


def _check_decay(optimizer: Optimizer, sparse: set[int]) -> None:
    """Torch finds out in its first step, and says no more than that it cannot add."""
    for group in optimizer.param_groups:
        tables = [p for p in group["params"] if id(p) in sparse]
        if tables and group.get("weight_decay") and type(optimizer) in DECAY_DENSE:
            raise ConfigurationError(
                f"optimizer={type(optimizer).__name__} with weight_decay={group['weight_decay']} has {len(tables)} "
                f"tables with sparse gradients, such as one of shape {list(tables[0].shape)}: torch decays only whole "
                "ones. Give them a parameter group with weight_decay=0, or, where every rank has the whole table, SGD "
                "momentum and a policy that takes it over"
            )


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
    # Also one that another optimizer steps on: its pushes would wait for a rank that waits here for the step before.
    embedded = any(isinstance(module, ShardedEmbedding) for module in model.modules())
    for name, why in _REASONS.items():
        if embedded if name == "a ShardedEmbedding" else given[name]:
            raise ConfigurationError(f"{what}, which {name} cannot go with: {why}")


def _let_rest(inner: torch.optim.Optimizer) -> None:
    """Frozen parameters have no gradient: by one of zeros, left from before, each rank's own momentum moves them."""
    for param in (param for group in inner.param_groups for param in group["params"]):
        if not param.requires_grad:
            param.grad = None


@torch.inference_mode(False)  # nothing can be changed outside of it that was made inside
def make_mode(parts: Parts, statistics: Mapping[str, Tensor]) -> GradientMode | UpdateMode:
    """What exchanges under the policy; ``statistics`` are those of BatchNorm layers, averaged with local steps.

    Raises:
        ConfigurationError: updates cannot be summed, or what the optimizer has cannot go with the policy; says why.
    """
    _tell_of_nothing(parts)
    _check_embeddings(parts)
    take_shares(parts.inner)
    if parts.policy.local_steps is not None:
        _check_local_steps(parts)
        _let_rest(parts.inner)
        return UpdateMode(parts, statistics)
    _check_grad_dtypes(parts)
    if parts.sliced is None:
        return GradientMode(parts)
    _check_halves(parts)
    return PriorityMode(parts)


def _check_embeddings(parts: Parts) -> None:
    if parts.embeddings and (kind := type(parts.inner).__name__) in DENSE_ONLY:
        raise ConfigurationError(
            f"optimizer={kind} takes no sparse gradients; {next(iter(parts.embeddings))!r} is a ShardedEmbedding's: "
            "give the tables to SparseAdam, Adagrad or SGD, in a wrapper of their own"
        )
    if parts.policy.local_steps is None:  # else gradients of rows are made dense where there is decay
        _check_decay(parts.inner, {id(table.weight) for table in parts.embeddings.values()})
    wrong = [name for name, table in parts.embeddings.items() if table.average != parts.settings.mean.average]
    if wrong:
        asked = "averages" if parts.settings.mean.average else "sums"
        raise ConfigurationError(
            f"the wrapper {asked} gradients, and the table of {wrong[0]!r} does not: ShardedEmbedding(average=...)"
        )


def _check_local_steps(parts: Parts) -> None:
    if parts.embeddings and parts.scale.enabled:
        raise ConfigurationError(
            "local_steps (policy='iwp' has them) with a scaler and a ShardedEmbedding: ranks scale their losses by "
            "themselves, and gradients of rows are summed over them. Train in bfloat16, without a scaler"
        )
    if not parts.settings.mean.average:
        raise ConfigurationError(
            "op=Sum with local_steps (policy='iwp' has them): what the ranks' weights have moved by is averaged. "
            "Exchange gradients: policy=ringprune.IWP()"
        )


def _check_grad_dtypes(parts: Parts) -> None:
    for spec, param in zip(parts.specs, parts.params, strict=True):
        dtype = getattr(param, "grad_dtype", None)  # torch has it since 2.10; None takes any
        if dtype not in (None, spec.dtype):
            raise ConfigurationError(
                f"parameter {spec.name!r} is {spec.dtype} with a grad_dtype of {dtype}: averages of gradients come in "
                "the parameter's dtype. Leave grad_dtype as it is, or make local steps (local_steps=)"
            )


def _tell_of_nothing(parts: Parts) -> None:
    """No error: torch and Horovod take frozen parameters too, and maybe none of this optimizer's is to be trained."""
    if not parts.params and not parts.embeddings and parts.comm.rank == 0:
        _log.warning(
            "no parameter of the wrapped optimizer requires a gradient: nothing is exchanged, and step() without a "
            "gradient raises. Unfreeze what is to be trained before the optimizer is wrapped"
        )


def _check_halves(parts: Parts) -> None:
    """What has added up may be beyond float16, and the first layers step before the last sums are known."""
    plan, sliced = parts.plan, parts.sliced
    assert sliced is not None
    averages = parts.settings.mean.average  # of gradients that are finite these are, if nothing was kept back
    buckets = [b for b in plan.buckets if b.route == "packed" or not (parts.policy.dense_as_is and averages)]
    kept = [sliced.params[i] for i in sorted({i for bucket in buckets for i in sliced.members(bucket)})]
    halves = [spec.name for spec in kept if spec.dtype == torch.float16]
    if halves:
        does = "keeps back a part" if averages else "sends sums"
        raise ConfigurationError(
            f"policy {parts.policy.name!r} schedules the forward pass and {does} of {len(halves)} float16 "
            f"parameters, such as {halves[0]!r}: what has added up may be too large for them when layers have made "
            "their steps already. Keep the parameters in float32, under torch.autocast, or in bfloat16"
        )


_REASONS = {
    "scaler": "it decides on all gradients together whether a step is made; train in bfloat16, without a scaler",
    'nonfinite="skip"': "the first layers have made the step before the gradients of all ranks are known",
    "guard": "it judges whole steps",
    "a ShardedEmbedding": "it pulls rows in the forward pass, when its owners' step has to be over",
    "hierarchical=True": "the order is agreed between ranks, and here nodes exchange",
}

_WAYS = {
    "OptimizedModule": "wrap the optimizer with the plain module, and compile parts of it",
    "DataParallel": "start one process per device",
    "DistributedDataParallel": "leave DDP away, RingPrune averages the gradients",
}
