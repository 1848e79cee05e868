"""Which of the modules that were called are layers, their names, and which parameters are whose."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

__all__ = ["OUTSIDE", "Layers"]

OUTSIDE = "(outside of modules)"


class Layers:
    """The layers of a script's model, in the order of their first call.

    A layer is a module that was called and holds parameters itself. A parameter whose own module was not called (as
    those of ``nn.MultiheadAttention.out_proj``, which the module around it reads) belongs to the smallest module around
    it that was. A tied parameter belongs to the first of its layers. Frozen parameters belong to none.

    Args:
        called: the modules that were called, in the order of their first call.
        roots: those of them that were called by no module: the model, perhaps also a loss.
        trained: the parameters that the optimizers step.

    Attributes:
        parameters: the trained parameters of each layer; none for layers that are frozen, or tied to an earlier one.
    """

    def __init__(self, called: Sequence[nn.Module], roots: Iterable[nn.Module], trained: Iterable[Tensor]) -> None:
        models = _models([*roots, *called])
        names, around = _names(models), _around(models)
        order = {module: number for number, module in enumerate(called)}
        owners: dict[nn.Module | Tensor, nn.Module] = {}
        for module in names:
            owner = next((outer for outer in _outwards(module, around) if outer in order), None)
            if owner is None:
                continue
            for param in module.parameters(recurse=False):
                owners[param] = min(owners.get(param, owner), owner, key=order.__getitem__)
        holders = {module for module in called if _learns(module, recurse=False)} | set(owners.values())
        self._names: dict[nn.Module | Tensor, str] = {module: names[module] for module in called if module in holders}
        self.parameters: dict[str, list[Tensor]] = {name: [] for name in self._names.values()}
        for tensor in trained:
            name = names[owners[tensor]] if tensor in owners else OUTSIDE
            self._names[tensor] = name
            self.parameters.setdefault(name, []).append(tensor)

    def of(self, what: nn.Module | Tensor) -> str | None:
        """The name of the layer that a module is, or that a parameter belongs to; None for all others."""
        return self._names.get(what)


def _learns(module: nn.Module, *, recurse: bool) -> bool:
    return any(True for _ in module.parameters(recurse))


def _models(called: Iterable[nn.Module]) -> list[nn.Module]:
    """Those with parameters that are in none of the others, once each."""
    learning = [module for module in dict.fromkeys(called) if _learns(module, recurse=True)]
    inner = {inside for module in learning for inside in module.modules() if inside is not module}
    return [module for module in learning if module not in inner]


def _names(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Names of all modules; where there are several models, behind those of their classes."""
    classes, names = Counter[str](), dict[nn.Module, str]()
    for model in models:
        own = type(model).__name__
        classes[own] += 1
        own += str(classes[own]) if classes[own] > 1 else ""
        for name, module in model.named_modules():
            whole = [own, name] if len(models) > 1 else [name or own]
            names.setdefault(module, ".".join(part for part in whole if part))
    return names


def _outwards(module: nn.Module, around: Mapping[nn.Module, nn.Module]) -> Iterator[nn.Module]:
    """Itself, the module around it, and so on."""
    outer: nn.Module | None = module
    while outer is not None:
        yield outer
        outer = around.get(outer)


def _around(models: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The module around each."""
    return {inner: outer for model in models for outer in model.modules() for inner in outer.children()}
