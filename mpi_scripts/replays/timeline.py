"""What was done when: as a trace for Chrome's viewer (chrome://tracing, ui.perfetto.dev), and as a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replays.model import Event
from ringprune.drawing import load_pyplot, save

__all__ = ["draw", "write_trace"]

TRACKS = {"forward": "compute", "backward": "compute", "network": "network"}
COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "network": "tab:green"}


def write_trace(events: Mapping[str, Sequence[Event]], path: Path) -> None:
    """One process for each method, with a track for compute and one for the network; times in microseconds."""
    found: list[dict[str, Any]] = []
    for number, (method, of_method) in enumerate(events.items()):
        found.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": method}})
        found += [
            {
                "ph": "X",
                "cat": what,
                "name": f"{what} {name}",
                "pid": number,
                "tid": TRACKS[what],
                "ts": 1e6 * start,
                "dur": 1e6 * (end - start),
            }
            for what, name, start, end in of_method
        ]
    path.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}) + "\n")


def draw(events: Mapping[str, Sequence[Event]], title: str, path: Path) -> None:
    """Compute above the network, method below method, on one axis of time.

    Raises:
        DependencyError: matplotlib is missing.
    """
    pyplot = load_pyplot()
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(10, 1 + 1.1 * len(events)))
    for number, of_method in enumerate(events.values()):
        for what, colour in COLOURS.items():
            bars = [(start, end - start) for kind, _, start, end in of_method if kind == what]
            height = -2.5 * number - (1 if TRACKS[what] == "network" else 0)
            axes.broken_barh(bars, (height, 0.9), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_yticks([-2.5 * number for number in range(len(events))], list(events))
    axes.set_xlabel("seconds; above: compute, below: messages under way")
    axes.set_title(title)
    axes.legend(handles=[Patch(color=colour, label=what) for what, colour in COLOURS.items()], loc="upper right")
    figure.tight_layout()
    save(figure, path)
