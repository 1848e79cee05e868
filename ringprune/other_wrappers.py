"""Wrappers of others around the same parameters: gradients averaged twice, and nothing saved."""

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ringprune.errors import ConfigurationError

__all__ = ["averaged_elsewhere", "check_not_averaged"]

_MODULES = {
    "DistributedDataParallel": "keep it and register ringprune.ddp_hook with it, or wrap the plain model's parameters "
    "without it. Where a framework makes it, set its require_backward_grad_sync = False: then it averages nothing",
    "FullyShardedDataParallel": "RingPrune exchanges whole gradients; wrap the plain model's parameters",
}


def check_not_averaged(params: Iterable[Tensor]) -> None:
    """Check that nobody else averages the gradients of ``params``.

    Raises:
        ConfigurationError: a module of torch.distributed or an optimizer of Horovod does.
    """
    if said := averaged_elsewhere(params):
        raise ConfigurationError(said)


def averaged_elsewhere(params: Iterable[Tensor]) -> str | None:
    """Who else averages the gradients of ``params``, and what to do about it; None where nobody does.

    Their hooks are out of sight, so their objects are looked for: nothing else tells that dense gradients travel too.
    """
    if not _possible():
        return None
    ids = {id(param) for param in params}
    if _found(ids):
        gc.collect()  # what nobody holds any more does no harm
        return _found(ids)
    return None


def _possible() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed or "horovod.torch" in sys.modules


def _found(ids: set[int]) -> str | None:
    for thing in gc.get_objects():
        kind = type(thing)
        try:
            if issubclass(kind, nn.Module):
                name = next((base.__name__ for base in kind.__mro__ if base.__name__ in _MODULES), None)
                if name is not None and not ids.isdisjoint(_averaged(thing)):
                    return f"a {name} averages the gradients of these parameters already, all of them: {_MODULES[name]}"
            horovods = issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("horovod.")
            if horovods and any(id(param) in ids for group in thing.param_groups for param in group["params"]):
                return (
                    "an optimizer of hvd.DistributedOptimizer averages the gradients of these parameters already: "
                    "ringprune.DistributedOptimizer takes its place, so remove that line"
                )
        except (AttributeError, RuntimeError):
            continue  # half made, by a constructor that failed or in another thread
    return None


def _averaged(wrapper: Any) -> set[int]:
    """What such a module averages: nothing that it was told to leave alone, or not at all."""
    if getattr(wrapper, "require_backward_grad_sync", True) is False:
        return set()
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    return {id(param) for name, param in wrapper.module.named_parameters() if name not in ignored}
