"""When gradients are ready: hooks count backward passes and report full buckets in the Plan's order."""

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ringprune.errors import ConfigurationError

__all__ = ["Backward", "is_watched"]

_owners: MutableMapping[Tensor, "weakref.ref[Backward]"] = WeakTensorKeyDictionary()
"""Which Backward watches a parameter: two on one parameter would both exchange its gradient."""


class Backward:
    """Watches parameters.

    Args:
        names: the parameters' names.
        params: their tensors.
        buckets: for each bucket, the positions of the parameters whose gradients it needs.
        passes: backward passes that make one step.
        full: bound method, called with a bucket's index when all its gradients have had their passes.
        passed: bound method, called after each gradient, of a bucket that is full or not.
        also: parameters that are exchanged elsewhere, by name: their gradients are of a backward pass as well.
        in_order: only once those of every bucket before it have too: in the same order on every rank, whatever order
            the hooks fire in.
        excess: bound method, called with a parameter's name when it gets another gradient after its last pass.

    Attributes:
        ready: called with a parameter's position when its gradient has had its passes; None if nobody asks.

    Raises:
        ConfigurationError: a parameter is watched by another wrapper.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        buckets: Sequence[Sequence[int]],
        passes: int,
        *,
        full: Callable[[int], None],
        passed: Callable[[], None],
        excess: Callable[[str], None],
        also: Mapping[str, Tensor] | None = None,
        in_order: bool = True,
    ) -> None:
        watched = [*zip(names, params, strict=True), *(also or {}).items()]
        for name, param in watched:
            if is_watched(param):
                raise ConfigurationError(
                    f"parameter {name!r} belongs to another ringprune.DistributedOptimizer: wrap a model once, or "
                    "close() the first wrapper"
                )
        self.passes = passes
        self.ready: Callable[[int], None] | None = None
        # Weak: the methods' owner holds this object, and is to go when the user drops it.
        self._full, self._excess = weakref.WeakMethod(full), weakref.WeakMethod(excess)
        self._passed = weakref.WeakMethod(passed)
        self._names, self._buckets, self._in_order = names, buckets, in_order
        self._buckets_of: list[list[int]] = [[] for _ in params]
        for number, members in enumerate(buckets):
            for i in members:
                self._buckets_of[i].append(number)
        self._hooks: list[RemovableHandle] = []
        self._params, self._watched = list(params), [param for _, param in watched]
        self.reset()
        this = weakref.ref(self)
        for index, param in enumerate(self._watched):
            _owners[param] = this
            # Not for torch.compile, where it was given a whole loop. torch leaves the method without annotations.
            hook = torch.compiler.disable(_hook(this, index))
            self._hooks.append(cast(Any, param).register_post_accumulate_grad_hook(hook))

    def reset(self) -> None:
        """A new step begins: no parameter has had a pass."""
        self.touched = False
        self._left = [self.passes] * len(self._params)
        self._missing = [len(members) for members in self._buckets]
        self._unreported = dict.fromkeys(range(len(self._missing)))

    def remaining(self) -> list[int]:
        """Buckets not reported yet in this step, which now are: called when no more gradients will come."""
        rest = list(self._unreported)
        self._unreported.clear()
        return rest

    def close(self) -> None:
        """Remove the hooks; the parameters can be wrapped again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for param in self._watched:
            _owners.pop(param, None)

    def accumulated(self, index: int) -> None:
        """The gradient of parameter ``index`` has had another backward pass added."""
        self.touched = True
        if index >= len(self._params):
            return
        if not self._left[index]:
            _alive(self._excess)(self._names[index])
            return
        self._left[index] -= 1
        if self._left[index]:
            return
        if self.ready is not None:
            self.ready(index)
        for bucket in self._buckets_of[index]:
            self._missing[bucket] -= 1
            if not self._in_order and not self._missing[bucket]:
                self._report(bucket)
        while self._in_order and self._unreported and not self._missing[first := next(iter(self._unreported))]:
            self._report(first)
        _alive(self._passed)()

    def _report(self, bucket: int) -> None:
        del self._unreported[bucket]
        _alive(self._full)(bucket)


def is_watched(param: Tensor) -> bool:
    """Whether some wrapper exchanges its gradient."""
    owner = _owners.get(param)
    return owner is not None and owner() is not None


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
