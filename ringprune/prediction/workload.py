"""What is trained: its tensors, and when a step of compute makes each of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ringprune.comm.communicator import CPU
from ringprune.errors import ConfigurationError
from ringprune.plan import ParamSpec, Plan
from ringprune.policies.policy import Policy
from ringprune.routing import plan_of
from ringprune.validation import real_number

__all__ = ["BACKWARD", "BUCKET_BYTES", "Layer", "Workload", "flat"]

BUCKET_BYTES = 25 << 20
"""The wrapper's default."""

BACKWARD = 2.0
"""Backward over forward where only their sum is known: gradients of the inputs, and of the weights."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer, or several that run as one.

    Attributes:
        name: what people call it.
        shapes: of its tensors; none for a layer that learns nothing.
        forward_seconds: of its forward pass.
        backward_seconds: of its backward pass, at whose end its gradients are there.
    """

    name: str
    shapes: tuple[Shape, ...]
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        real_number(f"forward_seconds of {self.name}", self.forward_seconds, least=0)
        real_number(f"backward_seconds of {self.name}", self.backward_seconds, least=0)


@dataclass(frozen=True)
class Workload:
    """A model on one device, at one batch size.

    Attributes:
        model: its name.
        layers: in the order of the forward pass.
        provenance: where the times come from, for people.
        specs: of the layers' tensors, in their order; none takes them to be float32 on the CPU, in one param group.
    """

    model: str
    layers: tuple[Layer, ...]
    provenance: str
    specs: tuple[ParamSpec, ...] = ()

    def __post_init__(self) -> None:
        if not any(layer.shapes for layer in self.layers):
            raise ConfigurationError(f"workload {self.model!r} learns nothing: there is nothing to exchange")

    @property
    def shapes(self) -> list[Shape]:
        """Of all tensors, in the order of the forward pass."""
        return [shape for layer in self.layers for shape in layer.shapes]

    @property
    def entries(self) -> int:
        """What the model learns."""
        return sum(map(prod, self.shapes))

    @property
    def forward_seconds(self) -> float:
        """Of the whole forward pass."""
        return sum(layer.forward_seconds for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward pass together."""
        return self.forward_seconds + sum(layer.backward_seconds for layer in self.layers)

    def taking(self, seconds: float, why: str) -> "Workload":
        """The same with another time of forward and backward together, spread over the layers as it is now.

        Where no layer takes any time now, in proportion to their entries.

        Args:
            seconds: at least 0.
            why: what the provenance says instead.
        """
        real_number("compute seconds", seconds, least=0)
        if not self.compute_seconds:
            return flat(self.model, [layer.shapes for layer in self.layers], seconds, why)
        factor = seconds / self.compute_seconds
        layers = tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, provenance=why)

    def plan(self, policy: Policy, bucket_bytes: int = BUCKET_BYTES, *, groups: bool = False) -> Plan:
        """The buckets that the wrapper makes of it; ``groups``: over a communicator that takes groups of tensors."""
        specs = self.specs or [ParamSpec(str(i), s, torch.float32, CPU, 0) for i, s in enumerate(self.shapes)]
        return plan_of(policy.routing, specs, bucket_bytes, (), groups=groups and policy.dense_as_is)


def flat(model: str, tensors: Sequence[Sequence[Shape]], seconds: float, provenance: str) -> Workload:
    """A workload whose layers take time in proportion to their entries, twice as long backward as forward.

    Args:
        model: its name.
        tensors: shapes of each layer's tensors, in the order of the forward pass.
        seconds: forward and backward together.
        provenance: where they come from.
    """
    numels = [sum(map(prod, shapes)) for shapes in tensors]
    unit = seconds / (1 + BACKWARD) / max(1, sum(numels))
    layers = (
        Layer(str(i), tuple(map(tuple, shapes)), unit * n, BACKWARD * unit * n)
        for i, (shapes, n) in enumerate(zip(tensors, numels, strict=True))
    )
    return Workload(model, tuple(layers), provenance)
