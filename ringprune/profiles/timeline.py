"""Whose time it was: what hooks saw in one iteration, divided among layers without a rest."""

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Kind", "Mark", "Times", "divide"]


class Kind(enum.Enum):
    """What a hook saw."""

    ENTER = "a module is called"
    LEAVE = "it returns"
    BACKWARD = "backward() is called"
    READY = "the gradient of a parameter is there"
    DONE = "backward() returns"


class Mark(NamedTuple):
    """One of them.

    Attributes:
        kind: what was seen.
        what: the module or the parameter; None for BACKWARD and DONE.
        when: a moment of the clock, later milliseconds.
    """

    kind: Kind
    what: Any
    when: Any


class Times(NamedTuple):
    """Milliseconds of one iteration, by layer."""

    forward: dict[str, float]
    backward: dict[str, float]


def divide(marks: Iterable[Mark], layer_of: Callable[[Any], str | None]) -> Times:
    """Divide an iteration's passes among layers; several passes, as with gradient accumulation, add up.

    A forward pass begins with the first module and ends where ``backward()`` is called. What runs outside of layers
    (activations, additions, the loss) is the layer's inside which it runs, else the one's before it; what comes before
    the first layer is the first layer's. A backward pass ends where ``backward()`` returns. The time until a gradient
    is there, since the one before it was, is its layer's; what follows the last is the last one's. So at every moment
    at which a gradient may be sent, or a parameter is needed, the times of the layers before it add up to that moment.
    A pass in which no layer takes part is left out.

    Args:
        marks: in their order, with milliseconds.
        layer_of: the layer a module is, or a parameter belongs to; None for what is no layer.
    """
    walk, before = _Walk(layer_of), 0.0
    for mark in marks:
        walk.spend(mark.when - before)
        walk.meet(mark)
        before = mark.when
    return Times(dict(walk.forward), dict(walk.backward))


class _Walk:
    """Walks along the marks, and knows whose time it is."""

    def __init__(self, layer_of: Callable[[Any], str | None]) -> None:
        self.forward: dict[str, float] = defaultdict(float)
        self.backward: dict[str, float] = defaultdict(float)
        self._layer_of = layer_of
        self._phase: Kind | None = None  # ENTER: forward; BACKWARD; None: neither
        self._inside: list[str | None] = []
        self._owner: str | None = None
        self._waiting = 0.0  # has no layer yet

    def spend(self, milliseconds: float) -> None:
        """So much later the next mark came."""
        if self._phase is Kind.ENTER and self._owner is not None:
            self.forward[self._owner] += milliseconds
        elif self._phase is not None:
            self._waiting += milliseconds

    def meet(self, mark: Mark) -> None:
        """The next mark."""
        layer = None if mark.what is None else self._layer_of(mark.what)
        if mark.kind is Kind.ENTER:
            self._enter(layer)
        elif mark.kind is Kind.LEAVE and self._inside:
            self._inside.pop()
            self._own(next((outer for outer in reversed(self._inside) if outer is not None), None))
        elif mark.kind is Kind.BACKWARD:
            self._phase, self._inside, self._waiting = mark.kind, [], 0.0
        elif mark.kind is Kind.READY and self._phase is Kind.BACKWARD and layer is not None:
            self._owner = layer
            self._hand_over(self.backward)
        elif mark.kind is Kind.DONE:
            self._hand_over(self.backward)
            self._phase = self._owner = None

    def _enter(self, layer: str | None) -> None:
        if self._phase is None:
            self._phase, self._inside, self._owner, self._waiting = Kind.ENTER, [], None, 0.0
        self._inside.append(layer)
        self._own(layer)

    def _own(self, layer: str | None) -> None:
        if layer is not None and self._phase is Kind.ENTER:
            self._owner = layer
            self._hand_over(self.forward)

    def _hand_over(self, times: dict[str, float]) -> None:
        """What waited for a layer is the owner's."""
        if self._owner is not None:
            times[self._owner] += self._waiting
            self._waiting = 0.0
