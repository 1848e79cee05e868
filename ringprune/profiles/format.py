"""A model's timeline: what each layer has to learn, and how long its forward and backward pass take."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringprune.errors import ConfigurationError
from ringprune.whole_file import write_whole

__all__ = ["BadProfile", "Layer", "Profile", "read", "text", "write"]

UNIT = "ms"

MOST = 10**18
"""Entries of a tensor are fewer: torch counts in 64 bits."""


class BadProfile(ConfigurationError):
    """A file is no profile; the message names the file, the layer and the field."""


@dataclass(frozen=True)
class Layer:
    """One layer, or several that run as one.

    Attributes:
        name: what tables and pictures call it.
        parameters: entries of each of its tensors; none for a layer that learns nothing.
        forward_ms: milliseconds of its forward pass.
        backward_ms: those of its backward pass.
    """

    name: str
    parameters: tuple[int, ...]
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Profile:
    """A model on one device.

    Attributes:
        model: its name.
        provenance: measured on what, or computed how; for people.
        layers: in the order of the forward pass.
    """

    model: str
    provenance: str
    layers: tuple[Layer, ...]

    @property
    def entries(self) -> int:
        """What the model learns."""
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def forward_ms(self) -> float:
        """The forward pass."""
        return math.fsum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """The backward pass."""
        return math.fsum(layer.backward_ms for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """Forward and backward pass together."""
        return math.fsum((self.forward_ms, self.backward_ms)) / 1e3


def read(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        BadProfile: it cannot be read, or a field is missing or cannot be; names it.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadProfile(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"{path} is not JSON: {error}") from error
    try:
        return _profile(found)
    except BadProfile as error:
        raise BadProfile(f"{path}: {error}") from None


def text(profile: Profile) -> str:
    """A profile as JSON, one line per layer."""
    head = {"model": profile.model, "provenance": profile.provenance, "unit": UNIT}
    lines = ",\n  ".join(json.dumps(asdict(layer)) for layer in profile.layers)
    return f'{json.dumps(head)[:-1]}, "layers": [\n  {lines}\n]}}\n'


def write(profile: Profile, path: Path) -> None:
    """Write a profile; a file of an earlier one is never seen half overwritten."""
    write_whole(text(profile), path)


def _profile(found: Any) -> Profile:
    if not isinstance(found, dict):
        raise BadProfile(f"an object with model, provenance, unit and layers is needed, this is {_kind(found)}")
    for field in ("model", "provenance"):
        if not isinstance(_field(found, field, "the profile"), str):
            raise BadProfile(f"{field!r} has to be text, not {_kind(found[field])}")
    if (unit := _field(found, "unit", "the profile")) != UNIT:
        raise BadProfile(f"'unit' is {unit!r}; only {UNIT!r}, milliseconds, is known")
    layers = _field(found, "layers", "the profile")
    if not isinstance(layers, list) or not layers:
        raise BadProfile("'layers' has to be a list of at least one layer")
    return Profile(
        found["model"], found["provenance"], tuple(_layer(number, entry) for number, entry in enumerate(layers))
    )


def _layer(number: int, found: Any) -> Layer:
    where = f"layer {number}"
    if not isinstance(found, dict):
        raise BadProfile(f"{where} has to be an object, not {_kind(found)}")
    name = _field(found, "name", where)
    if not isinstance(name, str):
        raise BadProfile(f"{where}: 'name' has to be text, not {_kind(name)}")
    where = f"{where} ({name})"
    parameters = _field(found, "parameters", where)
    if not isinstance(parameters, list) or not all(type(n) is int and 0 < n < MOST for n in parameters):
        raise BadProfile(
            f"{where}: 'parameters' has to be a list of the entries of each tensor, whole numbers above 0 and below "
            f"{MOST:g}"
        )
    return Layer(name, tuple(parameters), _time(found, "forward_ms", where), _time(found, "backward_ms", where))


def _time(found: Mapping[str, Any], field: str, where: str) -> float:
    value = _field(found, field, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise BadProfile(f"{where}: {field!r} has to be milliseconds, a number of at least 0, not {value!r}")
    return float(value)


def _field(found: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in found:
        others: Sequence[str] = sorted(found)
        raise BadProfile(f"{where} has no {field!r}, only {', '.join(map(repr, others)) or 'nothing'}")
    return found[field]


def _kind(found: Any) -> str:
    return "nothing" if found is None else type(found).__name__
