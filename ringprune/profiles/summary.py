"""From iterations that were recorded to the profile: medians that add up."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from ringprune.errors import UsageError
from ringprune.profiles.format import Layer, Profile
from ringprune.profiles.layers import Layers
from ringprune.profiles.record import Iteration, Recorder
from ringprune.profiles.timeline import divide

__all__ = ["medians", "passes", "profile_of"]


def profile_of(recorder: Recorder, model: str, provenance: str) -> Profile:
    """The profile of what was recorded.

    Args:
        recorder: after the script.
        model: its name.
        provenance: measured on what; for people.

    Raises:
        ConfigurationError: the parameters are where nothing can be timed.
        UsageError: nothing could be measured; says what was missing.
    """
    _check(recorder)
    layers = Layers(recorder.called, recorder.roots, recorder.trained)
    times = [divide(one.marks, layers.of) for one in recorder.iterations]
    forward = medians([time.forward for time in times], layers.parameters)
    backward = medians([time.backward for time in times], layers.parameters)
    made = [
        Layer(name, tuple(param.numel() for param in params), forward[name], backward[name])
        for name, params in layers.parameters.items()
    ]
    return Profile(model, provenance, tuple(made))


def medians(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Each layer's median over the iterations, all multiplied by one factor so that they add up to the median of sums.

    Args:
        rows: milliseconds by layer, of each iteration.
        names: the layers; one that an iteration does not have took no time in it.
    """
    columns = {name: [row.get(name, 0.0) for row in rows] for name in names}
    middle = {name: median(column) for name, column in columns.items()}
    if not math.fsum(middle.values()):  # layers that seldom run
        middle = {name: fmean(column) for name, column in columns.items()}
    whole, parts = median(math.fsum(row.values()) for row in rows), math.fsum(middle.values())
    return {name: value / parts * whole if parts else value for name, value in middle.items()}


def passes(iterations: Sequence[Iteration]) -> int:
    """Backward passes of an iteration, most often."""
    return round(median(one.passes for one in iterations))


def _check(recorder: Recorder) -> None:
    if recorder.problem is not None:
        raise recorder.problem
    if not recorder.steps:
        raise UsageError(
            "no step of a torch optimizer that follows a backward() was made"
            + ("" if recorder.roots else ", and no module with parameters was called")
        )
    if not recorder.iterations:
        raise UsageError(f"all of its {recorder.steps} steps were warm-up: --warmup says how many are left out")
    if not recorder.trained:
        raise UsageError(f"{recorder.steps} steps were made, and their optimizers have no parameters that are trained")
    if not recorder.called:
        raise UsageError(f"{recorder.steps} steps were made, but no module with parameters was called in them")
