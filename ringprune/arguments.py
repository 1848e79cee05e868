"""What ``DistributedOptimizer`` accepts: optimizers, communicators, parameters and their names; advice about them."""

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ringprune.comm import connect
from ringprune.comm.checked import CheckedCommunicator
from ringprune.comm.communicator import Communicator, Nodes, is_communicator
from ringprune.embedding import ShardedEmbedding, embedding_of
from ringprune.errors import ArgumentTypeError, ConfigurationError
from ringprune.guard import Guard
from ringprune.other_wrappers import check_not_averaged
from ringprune.plan import ParamSpec, on_one_device, why_unfit
from ringprune.policies import IWP, Policy
from ringprune.shared_momentum import SharedMomentum
from ringprune.wire import MAX_POSITIONS

__all__ = [
    "DENSE_ONLY",
    "advise",
    "check_guard",
    "check_optimizer",
    "communicator",
    "describe",
    "describe_parameters",
    "divide",
    "divide_parameters",
    "leave",
    "name_parameters",
    "refuse_unknown",
    "statistics",
    "warn_of_keeping_back",
]

_log = logging.getLogger("ringprune")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_SQUARES = "its square makes the steps after it too small"
_NORMALISING = dict.fromkeys(("Adadelta", "Adafactor", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop"), _SQUARES)
"""Optimizers that divide by a mean of squared gradients that forgets; with what derives from them, such as AdamW."""
_UNFIT = {**_NORMALISING, "Rprop": "step sizes follow signs, of gradients that are zero in most steps"}
"""What gradients that were kept back do to an optimizer."""

DENSE_ONLY = {"Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"}
"""Those of torch that raise at their first step on a sparse gradient."""

_SEVERAL = "it evaluates the loss several times per step, each time on this rank's batch alone"
_REFUSED = {
    "LBFGS": _SEVERAL,
    "SparseAdam": "it needs sparse gradients, and RingPrune makes dense ones unless rows travel or live on owners: use "
    "rp.Parallax() or dataclasses.replace(policy, rows=rp.Rows()), or local_steps",
}


def refuse_unknown(positional: Collection[Any], given: Iterable[str], wrapper: type[torch.optim.Optimizer]) -> None:
    """Say where arguments belong that the wrapper does not have, or does not take by position.

    Raises:
        ArgumentTypeError: there is one.
    """
    if positional:
        raise ArgumentTypeError(
            f"{wrapper.__name__} got {2 + len(positional)} arguments by position: only the optimizer and "
            "named_parameters go so; name the others, such as compression=, op= or policy="
        )
    for name in given:
        hint = ""
        if name in signature(IWP).parameters:
            hint = f"; it is a policy's: policy=ringprune.IWP({name}=...)"
        elif near := difflib.get_close_matches(
            name, set(signature(wrapper).parameters) - {"positional", "unknown"}, n=1
        ):
            hint = f"; did you mean {near[0]!r}?"
        raise ArgumentTypeError(f"{wrapper.__name__} has no argument {name!r}{hint}")


def check_guard(guard: Any, policy: Policy) -> Guard | None:
    """The guard, if it is one.

    Raises:
        ArgumentTypeError: it is not.
        ConfigurationError: it cannot judge what this policy keeps back.
    """
    if guard is not None and not isinstance(guard, Guard):
        raise ArgumentTypeError(f"guard={guard!r}: a ringprune.Guard, such as Guard(every=100), or None")
    if guard is not None and (policy.smoothing or policy.turns > 1 or policy.low_pass < 1):
        raise ConfigurationError(
            f"guard with smoothing={policy.smoothing:g}, turns={policy.turns} and low_pass={policy.low_pass:g}: it "
            "judges what each exchange takes from a residual, and so goes with smoothing=0, turns=1 and low_pass=1"
        )
    return guard


def check_optimizer(optimizer: Any, policy: Policy) -> torch.optim.Optimizer:
    """The optimizer to wrap.

    Raises:
        ArgumentTypeError: it is no torch optimizer.
        ConfigurationError: it is one that cannot work, or is wrapped already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if isinstance(optimizer, list):  # what Horovod's wrapper hands to the class that it derives from
            found = "a list of param groups, as from hvd.DistributedOptimizer around this one"
        elif isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            found = f"{'the class' if kind is optimizer else 'a'} {kind.__module__}.{kind.__qualname__}"
        else:
            found = f"a {type(optimizer).__module__}.{type(optimizer).__name__}"
        raise ArgumentTypeError(f"optimizer is {found}: the plain torch.optim.Optimizer is wanted, wrapped once")
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if module.startswith("ringprune") or hasattr(optimizer, "skip_synchronize"):
        raise ConfigurationError(f"optimizer is a {module}.{name} already; wrap the plain torch optimizer, once")
    params = [param for entry in optimizer.param_groups for param in entry["params"]]
    # Where it may see sparse gradients alone.
    sparse = policy.local_steps is not None or policy.rows is not None or all(map(embedding_of, params))
    if name in _REFUSED and not (sparse and name == "SparseAdam"):
        raise ConfigurationError(f"optimizer={name}: {_REFUSED[name]}")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(f"optimizer={name}: step() wants a closure: {_SEVERAL}")
    steps = policy.local_steps
    if steps is None or all(group.get("lr") is not None for group in optimizer.param_groups):
        return optimizer
    if steps.growth or (steps.shares_momentum and SharedMomentum.serves(optimizer)):
        raise ConfigurationError(
            f"optimizer={name} has no learning rate of its own, lr=None, which LocalSteps(growth=, "
            f"momentum={steps.momentum!r}) of policy {policy.name!r} go by: set one, or choose local_steps=4"
        )
    return optimizer


def advise(
    optimizer: torch.optim.Optimizer, policy: Policy, comm: Communicator, model: Any, *, given: Any = None
) -> None:
    """Log what a name stands for where it is no plain exchange, what is known to go wrong, and what to do.

    Args:
        optimizer: what is wrapped.
        policy: with which policy.
        comm: the ranks.
        model: the wrapper's ``model=``.
        given: the policy as the user gave it, maybe a name.
    """
    if given == "iwp" and policy.local_steps is not None:
        sends = (
            "all they moved by"
            if policy.density.target == 1
            else f"the most important {policy.density.target:.0%} of it"
        )
        rarer = ", and more rarely as the learning rate falls (step schedulers alike on all ranks),"
        rarer = rarer if policy.local_steps.growth else ""
        _log.warning(
            f'policy "iwp" for {type(optimizer).__name__}: every {policy.local_steps.count} steps{rarer} ranks '
            f"exchange what their weights moved by ({sends}, {policy.values}), and differ in between. Evaluate inside "
            "optimizer.shared_weights(), end with optimizer.flush(), and search the learning rate again; give the "
            "wrapper model= where it has BatchNorm. synchronize() does nothing; clipping and skipped steps are each "
            "rank's own. ringprune.IWP() exchanges gradients at every step"
        )
    if policy.rows is not None and not any(getattr(m, "sparse", False) is True for m in model.modules()):
        _log.warning(
            f"policy {policy.name!r} exchanges rows of sparse gradients, and no module of model= has sparse=True: "
            "everything is exchanged as without it"
        )
    if policy.schedule is not None and comm.kind == "horovod" and comm.size > 1:
        _log.warning(
            f"policy {policy.name!r} schedules its messages, and Horovod makes one after the other: every order waits "
            'behind what is under way, and training was slower than without. Give the wrapper comm="torch" or "mpi"'
        )
    if comm.size > 1 and model is not None and policy.local_steps is None:  # with them an exchange finds it
        _warn_of_max_norm(model)
    gradients = policy.local_steps is None and policy.density.target < 1
    if gradients:
        warn_of_keeping_back(optimizer, policy, "give the policy local_steps=1 or more")
    local = policy.local_steps
    if local is not None and local.shares_momentum and not SharedMomentum.serves(optimizer):
        _log.warning(
            f"local_steps with momentum={local.momentum!r} changes nothing: {type(optimizer).__name__} has no momentum "
            "that RingPrune knows how to set; it does of torch's SGD with momentum, Adam and AdamW"
        )


def _warn_of_max_norm(model: torch.nn.Module) -> None:
    """Torch scales the rows that a rank looks up, in its forward pass: the others do not."""
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if layer.max_norm is not None and layer.weight.requires_grad:
            _log.warning(
                f"{name or 'model='} has max_norm: each rank scales the rows that it looks up itself, and has other "
                "weights than the other ranks as soon as a norm is above that, which only check_every= finds after the "
                "first step. Leave max_norm out, and scale all rows after step(), alike on all ranks"
            )
            return


def warn_of_keeping_back(optimizer: torch.optim.Optimizer, policy: Policy, instead: str) -> None:
    """Where it does an optimizer harm that gradients come late, say so, and what to do instead."""
    harm = [_UNFIT[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _UNFIT]
    if harm:
        _log.warning(
            f"{type(optimizer).__name__} with gradients at density {policy.density.target:g}: what is kept back "
            f"arrives at once, and {harm[0]}. Exchange updates instead: {instead} (docs/quickstart.md, Local steps)"
        )


def describe(optimizer: torch.optim.Optimizer, statistics: Mapping[str, Tensor]) -> list[str]:
    """One line per param group with its plain settings, and per tensor of statistics, for the hand-shake."""
    lines = [f"optimizer is {type(optimizer).__name__}"]
    for index, group in enumerate(optimizer.param_groups):
        numbers = {k: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for k, v in group.items()}
        plain = {k: v for k, v in numbers.items() if isinstance(v, bool | int | float | str | tuple | None)}
        lines.append(f"param group {index} has {plain}")
    return lines + [f"statistics {name} {list(buffer.shape)}" for name, buffer in statistics.items()]


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor, int]]:
    """Name, parameter and param group of everything the optimizer updates, in its order.

    Raises:
        ArgumentTypeError: ``named_parameters`` does not give (name, parameter) pairs.
        ConfigurationError: names occur twice, parameters of the optimizer have no name, or others average gradients.
    """
    owned = [(p, group) for group, entry in enumerate(optimizer.param_groups) for p in entry["params"]]
    check_not_averaged(param for param, _ in owned if param.requires_grad)
    if named_parameters is None:
        return [(f"parameter {i}", param, group) for i, (param, group) in enumerate(owned)]
    if not isinstance(named_parameters, Iterable):
        raise ArgumentTypeError(
            f"named_parameters is of type {type(named_parameters).__name__}: model.named_parameters(), or None"
        )
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and torch.is_tensor(pair[1])):
            raise ArgumentTypeError(
                f"named_parameters holds {type(pair).__name__}: (name, parameter) pairs, as named_parameters() gives"
                + (", or the items() of a dict" if isinstance(named_parameters, dict) else "")
            )
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ConfigurationError(f"named_parameters has names twice: {', '.join(twice)}")
    by_id = {id(param): name for name, param in pairs}
    unnamed = [f"{list(p.shape)} in param group {group}" for p, group in owned if id(p) not in by_id]
    if unnamed:
        raise ConfigurationError(
            f"named_parameters leaves {len(unnamed)} of the optimizer's parameters unnamed: {', '.join(unnamed[:5])}; "
            "pass model.named_parameters() of the whole model"
        )
    return [(by_id[id(param)], param, group) for param, group in owned]


def divide_parameters(
    named: Iterable[tuple[str, Tensor, int]],
) -> tuple[list[tuple[str, Tensor, int]], dict[str, ShardedEmbedding]]:
    """The parameters that are exchanged, and the sharded embeddings, by name; frozen ones in neither."""
    trained: list[tuple[str, Tensor, int]] = []
    embeddings: dict[str, ShardedEmbedding] = {}
    for name, param, group in named:
        embedding = embedding_of(param)
        if embedding is not None and param.requires_grad:
            embeddings[name] = embedding
        elif param.requires_grad:
            trained.append((name, param, group))
    return trained, embeddings


def statistics(model: Any) -> dict[str, Tensor]:
    """The running statistics of a model's BatchNorm layers, by name.

    Raises:
        ArgumentTypeError: it is no module.
    """
    if model is None:
        return {}
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model={model!r}: a torch.nn.Module, or None")
    return {
        f"{name}.{kind}" if name else kind: buffer
        for name, layer in model.named_modules()
        if isinstance(layer, _NormBase)
        for kind, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


def describe_parameters(
    named: Iterable[tuple[str, Tensor, int]], sparse: Collection[int] = frozenset()
) -> list[ParamSpec]:
    """The facts of each parameter; ``sparse`` are the ids of those whose gradients travel as rows.

    Raises:
        ConfigurationError: a parameter is not real floating point, has more entries than the wire can address, has no
            memory yet, or is divided among ranks already.
    """
    named = list(named)
    for name, param, _ in named:
        why = why_unfit(param)
        if why is not None:
            raise ConfigurationError(f"parameter {name!r} {why}")
    specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.device, group, id(p) in sparse) for name, p, group in named]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ConfigurationError(f"parameter {spec}: only real floating-point parameters of 16 to 64 bits")
        if spec.numel > MAX_POSITIONS:
            raise ConfigurationError(f"parameter {spec}: at most {MAX_POSITIONS} entries")
    return on_one_device(specs)


def leave(comm: Communicator, nodes: Nodes | None, *, own: bool) -> None:
    """Let go of what was made for a wrapper, as far as one rank can alone.

    Args:
        comm: its communicator.
        nodes: the same divided for it.
        own: :func:`communicator` has made ``comm``; else that goes on, without its parts.
    """
    parts = () if nodes is None else (nodes.local, nodes.across)
    for made in (comm,) if own else parts:
        if isinstance(made, CheckedCommunicator):
            made.leave()


def divide(comm: Communicator, policy: Policy, params: Sequence[Tensor]) -> Nodes:
    """The ranks divided by node.

    Raises:
        ConfigurationError: the communicator cannot do it, or there are fewer nodes than roots.
    """
    if "divide" not in comm.abilities:
        raise ConfigurationError(f"hierarchical=True: the {comm.kind} communicator cannot divide its ranks by node")
    nodes = comm.divide(params[0].device if params else torch.device("cpu"))
    if policy.roots.count != "all" and policy.roots.count > nodes.count:
        raise ConfigurationError(
            f"roots={policy.roots.count} with hierarchical=True on {nodes.count} nodes: a node proposes once; at most "
            f'{nodes.count}, or "all"'
        )
    return nodes


def communicator(comm: Communicator | str | None, process_set: Any) -> Communicator:
    """The communicator that the arguments name.

    Raises:
        ArgumentTypeError, ConfigurationError, DependencyError: there is none such.
    """
    if comm is None or isinstance(comm, str):
        options = {} if process_set is None else {"process_set": process_set}
        return connect("horovod" if process_set is not None and comm is None else comm, **options)
    if not is_communicator(comm):
        raise ArgumentTypeError(f"comm={comm!r}: a communicator from ringprune.connect, its kind as a string, or None")
    if process_set is not None:
        raise ConfigurationError("process_set goes with Horovod: ringprune.connect('horovod', process_set=...)")
    return comm
