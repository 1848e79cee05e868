"""Steps of a wrapped optimizer on some of its parameters, with the settings that it had at an earlier time."""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringprune.errors import ConfigurationError, UsageError

__all__ = ["LayerSteps"]


class LayerSteps:
    """Lets any optimizer whose state is per parameter make one step in parts.

    The settings in its param groups (learning rate, momentum, ...) may change before the last part is made: a scheduler
    follows ``step()`` at once. So they are remembered.

    Args:
        inner: the optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._settings: list[dict[str, Any]] = []
        self._places: dict[int, tuple[int, int]] = {}  # of each parameter by its id: its group, and where it is there

    def remember(self) -> None:
        """The settings are as the step is to be made with."""
        self._settings = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._inner.param_groups
        ]
        self._places = {
            id(param): (number, place)
            for number, group in enumerate(self._inner.param_groups)
            for place, param in enumerate(group["params"])
        }

    def check(self) -> None:
        """Before anything is taken for a part of the step: once the groups are as they were, it can still be made.

        Raises:
            UsageError: it has more param groups than when they were remembered, or fewer.
        """
        before, now = len(self._settings), len(self._inner.param_groups)
        if before != now:
            raise UsageError(
                f"{type(self._inner).__name__} had {before} param groups when its step began, and has {now} now: with "
                "a schedule layers step until the next backward pass. Give it the groups that it had, call "
                "synchronize(), flush() and close() the wrapper, change the groups, and wrap again"
            )

    @contextmanager
    def only(self, params: Collection[Tensor]) -> Iterator[None]:
        """Inside, the optimizer has these parameters only, and the settings remembered.

        Raises:
            ConfigurationError: it changed a setting, so that parts of a step are not the whole step.
        """
        groups = self._inner.param_groups
        kept = list(groups)
        parts = [{**copy.deepcopy(settings), "params": []} for settings in self._settings]
        # Looked up, and not looked for among all parameters: a large model makes a step in hundreds of parts.
        known = [param for param in params if id(param) in self._places]
        for param in sorted(known, key=lambda param: self._places[id(param)]):
            parts[self._places[id(param)][0]]["params"].append(param)
        groups[:] = parts
        try:
            yield
        finally:
            groups[:] = kept
        for number, (settings, part) in enumerate(zip(self._settings, parts, strict=True)):
            changed = [key for key in part if key != "params" and not _same(part[key], settings.get(key))]
            if changed:
                raise ConfigurationError(
                    f"{type(self._inner).__name__} keeps {changed[0]!r} of param group {number} from step to step: it "
                    "cannot make a step layer by layer; use a policy without schedule=LayerPriority()"
                )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
