"""A profile from operation counts: what a device of a stated speed would take, if every operation ran at that speed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ringprune.profiles.format import Layer, Profile

__all__ = ["counted"]

BACKWARD = 2.0
"""Operations of the backward pass per one of the forward pass: the gradients of inputs, and those of weights."""


def counted(name: str, model: nn.Module, inputs: Sequence[Tensor], flops: float, provenance: str) -> Profile:
    """The profile of a model on the meta device, where nothing is computed.

    Layers are the innermost modules in the order in which they run; what runs outside of them (attention by hand, for
    example) is counted with the module before.

    Args:
        name: the model's.
        model: on the meta device.
        inputs: of its forward pass, on the meta device.
        flops: floating-point operations per second, an addition and a multiplication being two.
        provenance: what the profile says of itself.
    """
    order, counter = _Order(model), FlopCounterMode(display=False)
    with counter:
        order.note(counter, None)
        model(*inputs)
        order.note(counter, None)
    layers = []
    for module, operations in order.operations.items():
        parameters = tuple(p.numel() for p in module.parameters(recurse=False))
        if parameters or operations:
            forward = 1e3 * operations / flops
            layers.append(Layer(order.names[module], parameters, forward, BACKWARD * forward))
    return Profile(name, provenance, tuple(layers))


class _Order:
    """The innermost modules in the order of their first call, and what was counted from each call to the next."""

    def __init__(self, model: nn.Module) -> None:
        self.names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self.operations: dict[nn.Module, float] = {}
        self._running: nn.Module | None = None
        self._counter: FlopCounterMode | None = None
        self._before = 0.0
        for module in self.names:
            if not list(module.children()):
                module.register_forward_pre_hook(lambda module, args: self.note(self._counter, module))

    def note(self, counter: FlopCounterMode | None, module: nn.Module | None) -> None:
        """``module`` runs from now on; None begins or ends the count."""
        assert counter is not None
        self._counter = counter
        now = float(counter.get_total_flops())
        if self._running is not None:
            self.operations[self._running] += now - self._before
        self._before = now
        if module is not None:
            self._running = module
            self.operations.setdefault(module, 0.0)


def meta(*shape: int, words: bool = False) -> Tensor:
    """An input on the meta device; ``words`` are whole numbers."""
    return torch.empty(*shape, dtype=torch.long if words else torch.float32, device="meta")
