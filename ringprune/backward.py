"""When gradients are ready: hooks count backward passes and report full buckets in the Plan's order."""

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ringprune.errors import ConfigurationError
from ringprune.plan import Plan

__all__ = ["Backward"]

_owners: MutableMapping[Tensor, "weakref.ref[Backward]"] = WeakTensorKeyDictionary()
"""Which Backward watches a parameter: two on one parameter would both exchange its gradient."""


class Backward:
    """Watches the parameters of a Plan.

    Args:
        plan: the parameters and buckets.
        params: their tensors, in the Plan's order.
        passes: backward passes that make one step.
        full: bound method, called with a bucket's index when all its gradients have had their passes, and those of
            every bucket before it: in the same order on every rank, whatever order the hooks fire in.
        excess: bound method, called with a parameter's name when it gets another gradient after its last pass.

    Raises:
        ConfigurationError: a parameter is watched by another wrapper.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        passes: int,
        *,
        full: Callable[[int], None],
        excess: Callable[[str], None],
    ) -> None:
        for spec, param in zip(plan.params, params, strict=True):
            owner = _owners.get(param)
            if owner is not None and owner() is not None:
                raise ConfigurationError(
                    f"parameter {spec.name!r} belongs to another ringprune.DistributedOptimizer: wrap a model once, or "
                    "close() the first wrapper"
                )
        self.passes = passes
        # Weak: the methods' owner holds this object, and is to go when the user drops it.
        self._plan, self._full, self._excess = plan, weakref.WeakMethod(full), weakref.WeakMethod(excess)
        self._bucket_of = {i: bucket.index for bucket in plan.buckets for i in bucket.members}
        self._hooks: list[RemovableHandle] = []
        self._params = list(params)
        self.reset()
        this = weakref.ref(self)
        for index, param in enumerate(params):
            _owners[param] = this
            # torch leaves this method without annotations.
            self._hooks.append(cast(Any, param).register_post_accumulate_grad_hook(_hook(this, index)))

    def reset(self) -> None:
        """A new step begins: no parameter has had a pass."""
        self.touched = False
        self._left = [self.passes] * len(self._params)
        self._missing = [len(bucket.members) for bucket in self._plan.buckets]
        self._next = 0

    def remaining(self) -> range:
        """Buckets not reported yet in this step, which now are: called when no more gradients will come."""
        rest = range(self._next, len(self._missing))
        self._next = len(self._missing)
        return rest

    def close(self) -> None:
        """Remove the hooks; the parameters can be wrapped again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for param in self._params:
            _owners.pop(param, None)

    def accumulated(self, index: int) -> None:
        """The gradient of parameter ``index`` has had another backward pass added."""
        self.touched = True
        if not self._left[index]:
            _alive(self._excess)(self._plan.params[index].name)
            return
        self._left[index] -= 1
        if self._left[index]:
            return
        self._missing[self._bucket_of[index]] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
            _alive(self._full)(self._next - 1)


def _alive(method: "weakref.WeakMethod[Callable[..., None]]") -> Callable[..., None]:
    found = method()
    assert found is not None, "a wrapper went while its parameters were being watched"
    return found


def _hook(backward: "weakref.ref[Backward]", index: int) -> Callable[[Tensor], None]:
    """A hook that does not keep the wrapper alive."""

    def hook(param: Tensor) -> None:
        watcher = backward()
        if watcher is not None:
            watcher.accumulated(index)

    return hook
