"""Wrappers of others around the same parameters: gradients averaged twice, and nothing saved."""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringprune.errors import ConfigurationError

__all__ = ["Others", "averaged_elsewhere", "check_not_averaged", "ranks_of_ddp"]

_MODULES = {
    "DistributedDataParallel": "keep it and register ringprune.ddp_hook with it, or wrap the plain model's parameters "
    "without it. Where a framework makes it, set its require_backward_grad_sync = False: then it averages nothing",
    "FullyShardedDataParallel": "RingPrune exchanges whole gradients; wrap the plain model's parameters",
}

_HOROVODS = (
    "an optimizer of hvd.DistributedOptimizer averages the gradients of these parameters already: "
    "ringprune.DistributedOptimizer takes its place, so remove that line"
)


def check_not_averaged(params: Iterable[Tensor]) -> None:
    """Check that nobody else averages the gradients of ``params``.

    Raises:
        ConfigurationError: a module of torch.distributed or an optimizer of Horovod does.
    """
    if said := averaged_elsewhere(params):
        raise ConfigurationError(said)


def averaged_elsewhere(params: Iterable[Tensor]) -> str | None:
    """Who else averages the gradients of ``params``, and what to do about it; None where nobody does."""
    ids = {id(param) for param in params}
    if any(not _keeps_still(holder) for holder, _ in _holders(ids)):
        gc.collect()  # what nobody holds any more does no harm
        return next((said for holder, said in _holders(ids) if not _keeps_still(holder)), None)
    return None


def ranks_of_ddp(params: Iterable[Tensor]) -> list[int]:
    """Over how many ranks each ``DistributedDataParallel`` of ``params`` averages, of those that do not keep still."""
    holders = (holder for holder, _ in _holders({id(param) for param in params}) if not _keeps_still(holder))
    groups = (getattr(holder, "process_group", None) for holder in holders)
    return [int(group.size()) for group in groups if group is not None]


class Others:
    """Who came after the optimizer was wrapped: looked for after the first step, then asked at every step.

    Frameworks make ``DistributedDataParallel`` late, keep it still for a while (``no_sync()``), and set it back.

    Args:
        params: whose gradients.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._holders: list[weakref.ref[Any]] | None = None  # whether they keep still or not

    def averaging(self) -> str | None:
        """As :func:`averaged_elsewhere`, after a step."""
        if self._holders is None or any(holder() is None for holder in self._holders):
            self._holders = [weakref.ref(holder) for holder, _ in _holders({id(param) for param in self._params})]
        averages = any(not _keeps_still(holder()) for holder in self._holders)
        return averaged_elsewhere(self._params) if averages else None


def _holders(ids: set[int]) -> Iterator[tuple[Any, str]]:
    """Modules and optimizers that average gradients of parameters, unless they keep still; and what to say of each.

    Their hooks are out of sight, so the objects are looked for: nothing else tells that dense gradients travel too.
    """
    kinds = _kinds()
    # Every object refers to its class, and the interpreter looks through all of them faster than a loop would.
    for thing in gc.get_referrers(*kinds) if kinds else ():
        try:
            if type(thing) in kinds and not ids.isdisjoint(_held(thing)):
                yield thing, kinds[type(thing)]
        except (AttributeError, RuntimeError):
            continue  # half made, by a constructor that failed or in another thread


def _kinds() -> dict[type, str]:
    """The classes whose objects average gradients, and what to say of one.

    Horovod makes a class for each optimizer, from an optimizer's; where it wraps none there is nothing to look for.
    """
    kinds: dict[type, str] = {}
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for kind in _subclasses(nn.Module):
            name = next((base.__name__ for base in kind.__mro__ if base.__name__ in _MODULES), None)
            if name is not None:
                said = f"a {name} averages the gradients of these parameters already, all of them: {_MODULES[name]}"
                kinds[kind] = said
    if "horovod.torch" in sys.modules:
        for kind in _subclasses(torch.optim.Optimizer):
            if kind.__module__.startswith("horovod.") and torch.optim.Optimizer not in kind.__bases__:
                kinds[kind] = _HOROVODS
    return kinds


def _subclasses(base: type) -> set[type]:
    direct: set[type] = set(base.__subclasses__())
    return direct.union(*map(_subclasses, direct))


def _held(thing: Any) -> set[int]:
    """The parameters whose gradients it averages: of a module, none that it was told to leave alone."""
    if isinstance(thing, torch.optim.Optimizer):
        return {id(param) for group in thing.param_groups for param in group["params"]}
    ignored = getattr(thing, "parameters_to_ignore", ())
    return {id(param) for name, param in thing.module.named_parameters() if name not in ignored}


def _keeps_still(holder: Any) -> bool:
    """Whether it averages nothing; what is gone does not either."""
    return holder is None or getattr(holder, "require_backward_grad_sync", True) is False
