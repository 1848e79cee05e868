"""The models that can be advised on without running them, and profiles of others."""

import difflib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringprune.errors import ConfigurationError
from ringprune.prediction import Layer, Workload, flat
from ringprune.profiles import format as profiles

__all__ = ["MODELS", "known", "of_entries", "workload"]

LAYERS = 32
"""Equal matrices into which a bare number of entries is cut."""

MATRIX = 2048
"""Entries from which on a tensor of which no more is known is taken for a matrix: the policies' ``min_numel``."""


@cache
def _table() -> Any:
    return json.loads(files("ringprune.advise").joinpath("models.json").read_text())


MODELS: tuple[str, ...] = tuple(_table()["models"])
"""Names of the models that are known."""


def workload(name: str) -> Workload:
    """The workload of a model's name, or of a profile in a file.

    Raises:
        ConfigurationError: there is no such model, or the file is no profile; says which models there are.
    """
    if name.endswith(".json"):
        return _profile(Path(name))
    return known(name)


def known(name: str) -> Workload:
    """A model by its name, with times from operation counts.

    Raises:
        ConfigurationError: it is not known.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"model {name!r}: known are {', '.join(MODELS)}; a profile is a file that ends in .json{hint}"
        )
    table = _table()
    model = table["models"][name]
    layers = (Layer(n, tuple(map(tuple, s)), forward / 1e3, back / 1e3) for n, s, forward, back in model["layers"])
    provenance = f"{model['batch']} at {table['teraflops']:g} TFLOP/s, computed from operation counts"
    return Workload(name, tuple(layers), provenance)


def of_entries(entries: int, seconds: float) -> Workload:
    """A model of which only the number of entries is known: equal matrices, in equal times.

    Args:
        entries: at least 1.
        seconds: forward and backward pass together.
    """
    layers = min(LAYERS, entries)
    ends = [entries * i // layers for i in range(layers + 1)]
    tensors: Sequence[Sequence[tuple[int, ...]]] = [[(1, b - a)] for a, b in pairwise(ends)]
    return flat(f"{entries:,} entries", tensors, seconds, f"as given, spread evenly over {layers} equal matrices")


def _profile(path: Path) -> Workload:
    """A profile's layers; it tells the entries of each tensor, and no shapes.

    Raises:
        BadProfile: it cannot be read, or a field is missing or cannot be.
    """
    profile = profiles.read(path)
    layers = [
        Layer(
            layer.name,
            tuple((1, n) if n >= MATRIX else (n,) for n in layer.parameters),
            layer.forward_ms / 1e3,
            layer.backward_ms / 1e3,
        )
        for layer in profile.layers
    ]
    return Workload(profile.model, tuple(layers), f"{path.name}: {profile.provenance}")
