"""Parameters that the ranks have not agreed on: unfrozen, moved, converted, or put into the model since wrapping."""

from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ringprune.backward import is_watched
from ringprune.plan import ParamSpec

__all__ = ["MOVED", "Strangers"]

MOVED = (
    "{!r} was in param group {} when the optimizer was wrapped and is in {} now: flush() and close() the wrapper, and "
    "only then move it and wrap again"
)
_CONVERTED = (
    "{!r} was {} when the optimizer was wrapped and is {} now: convert the model, with double(), half() or bfloat16(), "
    "before its optimizer is wrapped"
)

ALWAYS, EVERY = 3, 16
"""The model is looked through at the first exchanges, and then at one of so many: it takes a part of a millisecond."""


class Strangers:
    """Looks for them.

    Args:
        inner: the wrapped optimizer.
        params: what is exchanged.
        specs: the same parameters' facts, as the ranks have agreed on them.
        others: what the optimizer has besides, and exchanges elsewhere.
        model: the model, if it is known.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        others: Sequence[Tensor],
        model: nn.Module | None,
    ) -> None:
        self._inner, self._model = inner, model
        self._spec_of = {id(param): spec for param, spec in zip(params, specs, strict=True)}
        self._known = {*self._spec_of, *map(id, others)}
        # By weak references: a number alone may be a later parameter's.
        self._there: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._there.update((param, True) for param in (model.parameters() if model is not None else ()))
        self._held = self._spec_of.keys() & {id(param) for param in self._there}
        self._looks = 0

    def in_optimizer(self, *, grouped: bool) -> Iterator[str]:
        """What is wrong with what the optimizer has; ``grouped``: a parameter's group matters."""
        for number, group in enumerate(self._inner.param_groups):
            for param in group["params"]:
                spec = self._spec_of.get(id(param))
                if spec is not None and grouped and spec.group != number:
                    yield MOVED.format(spec.name, spec.group, number)
                if spec is not None and spec.dtype != param.dtype:
                    yield _CONVERTED.format(spec.name, spec.dtype, param.dtype)
                if param.requires_grad and id(param) not in self._known:
                    yield (
                        f"{self._called(param)} in param group {number} requires a gradient and did not, or was not "
                        "there, when the optimizer was wrapped: freeze it, flush() and close() the wrapper, and only "
                        "then unfreeze it, give all ranks the same weights (ringprune.broadcast_parameters) and wrap "
                        "again"
                    )

    def _called(self, param: Tensor) -> str:
        named = () if self._model is None else self._model.named_parameters()
        names = [repr(name) for name, known in named if known is param]
        return names[0] if names else f"a parameter of shape {list(param.shape)}"

    def in_model(self) -> str | None:
        """What is wrong with what the model trains: a layer that took another's place is in no optimizer."""
        self._looks += 1
        if self._model is None or (self._looks > ALWAYS and self._looks % EVERY):
            return None
        named = list(self._model.named_parameters())
        if not self._held.difference(id(param) for _, param in named):
            return None  # what has come besides, such as a probe, may have an optimizer of its own
        for name, param in named:
            if param.grad is not None and param not in self._there and not is_watched(param):
                self._looks = 0  # so it is told again
                return (
                    f"{name!r} has a gradient and was not in the model when the optimizer was wrapped: it is neither "
                    "exchanged nor stepped on. flush() and close() the wrapper, give all ranks the same weights "
                    "(ringprune.broadcast_parameters), and wrap an optimizer that has it"
                )
        return None
