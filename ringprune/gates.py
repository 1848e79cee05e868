"""Where a forward pass first uses each parameter, and hooks there that wait until it has been updated.

A parameter's own module is not always where it is used first: tied weights have several, and some modules read the
weights of others (``nn.MultiheadAttention`` those of its output layer, whose forward is never called). So the first
forward pass in training is watched: every torch function tells which parameters it was given, and a parameter's gate is
the innermost module that was running then. What no torch function was given (a user's own autograd functions tell
nothing) is waited for in the module that holds it, or the nearest around that which runs. Until all this is known, and
wherever a module is called outside the model's own forward pass, everything is waited for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

__all__ = ["Gates"]


class Gates:
    """Hooks on a model's modules.

    Args:
        model: the model.
        params: the parameters that are waited for.
        arrive: called before a module runs that uses parameters, with their positions in ``params``; it returns when
            they are up to date.

    Attributes:
        order: the parameters' positions in the order of their first use; as given until that is known.
        keep: whatever is to live as long as the model does.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor], arrive: Callable[[Sequence[int]], None]) -> None:
        # torch.compile, which goes into hooks, would run parts of it in another order, or at another time.
        self._model, self._arrive = model, torch.compiler.disable(arrive)
        self._everything = list(range(len(params)))
        self._position = {id(param): i for i, param in enumerate(params)}
        self.order = self._everything
        self._inside = self._known = False
        self._watch: _FirstUse | None = None
        self._hooks: list[RemovableHandle] = []
        self._gates: Mapping[nn.Module, list[int]] = {}
        self._early: set[int] = set()
        self.keep: object = None
        self._place()

    def close(self) -> None:
        """Remove the hooks."""
        if self._watch is not None:
            self._watch.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _place(self) -> None:
        """Hooks where they are needed, as far as is known."""
        for hook in self._hooks:
            hook.remove()
        # Before hooks that are there already: those may read parameters (weight_norm does).
        self._hooks = [
            self._model.register_forward_pre_hook(self._enter, prepend=True),
            self._model.register_forward_hook(self._leave, always_call=True),
        ]
        for module in self._model.modules():
            wanted = sorted({*self._own(module), *self._gates.get(module, ())})
            if module is not self._model and (wanted or not self._known):
                self._hooks.append(module.register_forward_pre_hook(partial(self._gate, wanted), prepend=True))
            # Saving and loading reads and writes them where no forward pass waits.
            for register in (module.register_state_dict_pre_hook, module.register_load_state_dict_pre_hook):
                self._hooks.append(register(self._everything_else))  # type: ignore[no-untyped-call]  # torch's, without annotations

    def _everything_else(self, *state: Any) -> None:
        """Before a module's state is saved or loaded."""
        self._arrive(self._everything)

    def _gate(self, wanted: Sequence[int], module: nn.Module, args: Any) -> None:
        self._arrive(wanted if self._inside else self._everything)

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Before the model's own forward pass; one for evaluation may go another way, and waits for everything."""
        self._inside = True
        training = module.training and torch.is_grad_enabled()
        self._arrive([*self._gates.get(module, ()), *self._early] if self._known and training else self._everything)
        if not self._known and self._watch is None and training:
            self._watch = _FirstUse(self._model, self._position)

    def early(self, positions: Collection[int]) -> bool:
        """From now on these are waited for before the model runs: a forward pass has used them before their gates.

        Returns:
            Whether some were so already: no hook of the model comes before their use.
        """
        again = not self._early.isdisjoint(positions)
        self._early.update(positions)
        return again

    def __reduce__(self) -> Any:
        """A copy of the model, or one that is saved, has hooks that do nothing."""
        return _inert, ()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it failed; then ``output`` is None."""
        self._inside = False
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            if output is not None:
                self._learn(watch)

    def _learn(self, watch: "_FirstUse") -> None:
        gates: dict[nn.Module, list[int]] = {}
        uses = dict(watch.first)
        parents = {child: module for module in self._model.modules() for child in module.children()}
        for module in self._model.modules():
            around = module
            while around not in watch.called:  # the model was
                around = parents[around]
            for position in self._own(module):
                # Where it was not seen: used by a function of the user's own, or not at all.
                uses.setdefault(position, (watch.called[around], around))
        self.order = sorted(uses, key=lambda position: uses[position][0])
        for position in self.order:
            gates.setdefault(uses[position][1], []).append(position)
        self._gates, self._known = gates, True
        self._place()

    def _own(self, module: nn.Module) -> list[int]:
        """The parameters that a module holds itself."""
        return [self._position[id(p)] for p in module.parameters(recurse=False) if id(p) in self._position]


def _inert() -> Gates:
    """Gates of no parameters."""
    return Gates(nn.Module(), [], lambda needed: None)


class _FirstUse(TorchFunctionMode):
    """Notes which module was running when each parameter was first given to a torch function.

    Args:
        model: the model, whose modules are followed; it is running.
        position: the parameters' positions, by their ``id``.

    Attributes:
        first: by position: when it was used first, and in which module.
        called: when each module was called first; times are counted from 0.
    """

    def __init__(self, model: nn.Module, position: Mapping[int, int]) -> None:
        super().__init__()
        self.first: dict[int, tuple[int, nn.Module]] = {}
        self.called = {model: 0}
        self._position, self._running, self._time = position, [model], 1
        self._hooks = [
            handle
            for module in model.modules()
            if module is not model
            for handle in (
                module.register_forward_pre_hook(lambda module, args: self._push(module)),
                module.register_forward_hook(lambda module, args, output: self._pop(), always_call=True),
            )
        ]
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's, without annotations

    def _push(self, module: nn.Module) -> None:
        self._running.append(module)
        self.called.setdefault(module, self._tick())

    def _pop(self) -> None:
        self._running.pop()

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def end(self) -> None:
        """Watch no longer; nothing the second time.

        After Ctrl-C, for which torch calls no hooks, this may come late, when others' modes (that of a default device
        is one) lie above: leaving ours as ``with`` does would take one of theirs.
        """
        for hook in self._hooks:
            hook.remove()
        if self not in overrides._get_current_function_mode_stack():
            return
        above = []
        while (mode := overrides._pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            overrides._push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters among the arguments, and call ``func``."""
        self._note((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _note(self, given: Any) -> None:
        if isinstance(given, Tensor):
            position = self._position.get(id(given))
            if position is not None and position not in self.first:
                self.first[position] = self._tick(), self._running[-1]
        elif isinstance(given, list | tuple):
            for each in given:
                self._note(each)
        elif isinstance(given, dict):
            for each in given.values():
                self._note(each)
