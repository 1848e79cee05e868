"""A profile for people: its heaviest layers, and what they add up to."""

from collections.abc import Callable, Sequence
from typing import Any

from ringprune.bench.table import print_table
from ringprune.profiles.format import Layer, Profile

__all__ = ["show"]

SHOWN = 12
FP32_BYTES = 4

Row = dict[str, Any]


# heading, what stands below it
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("layer", lambda row: str(row["name"])),
    ("entries", lambda row: f"{row['entries']:,}"),
    ("forward ms", lambda row: f"{row['forward_ms']:,.3f}"),
    ("backward ms", lambda row: f"{row['backward_ms']:,.3f}"),
    ("of time", lambda row: f"{100 * row['share']:.1f} %"),
)


def show(profile: Profile) -> None:
    """Print the layers with the largest shares of time or entries in the order of the forward pass, and the sums."""
    print(f"\n{profile.model}: {profile.provenance}\n")
    heavy = sorted(profile.layers, key=lambda layer: _weight(profile, layer), reverse=True)[:SHOWN]
    chosen = {layer.name for layer in heavy}
    rest = [layer for layer in profile.layers if layer.name not in chosen]
    rows = [_row(profile, layer.name, [layer]) for layer in profile.layers if layer.name in chosen]
    if rest:
        rows.append(_row(profile, f"{len(rest)} others", rest))
    print_table(COLUMNS, [*rows, _row(profile, "sum", profile.layers)])
    print(f"\ndense fp32 gradients: {FP32_BYTES * profile.entries:,} bytes for each exchange")


def _weight(profile: Profile, layer: Layer) -> float:
    entries = sum(layer.parameters) / profile.entries
    return max(_time([layer]) / (_time(profile.layers) or 1.0), entries)


def _row(profile: Profile, name: str, layers: Sequence[Layer]) -> Row:
    part, share = Profile(name, "", tuple(layers)), _time(layers) / (_time(profile.layers) or 1.0)
    passes = {"forward_ms": part.forward_ms, "backward_ms": part.backward_ms}
    return {"name": name, "entries": part.entries, "share": share} | passes


def _time(layers: Sequence[Layer]) -> float:
    return sum(layer.forward_ms + layer.backward_ms for layer in layers)
