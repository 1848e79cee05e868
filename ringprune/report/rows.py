"""What a run comes to, from the lines that :class:`ringprune.StatsLog` wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringprune.stats_log import Line

__all__ = ["Row", "row_of", "sent"]

Row = dict[str, Any]


def row_of(path: Path, lines: Sequence[Line]) -> Row:
    """What a run comes to: rates between its first line and its last, counters at its end.

    Statistics begin anew where a run was resumed: its parts are added up. The realised density, and what was noted, are
    the last part's.
    """
    parts = _parts(lines)
    end = lines[-1]["stats"]
    steps, seconds = (sum(part[-1][name] - part[0][name] for part in parts) for name in ("calls", "elapsed_seconds"))

    def added(name: str) -> float:
        return sum(_count(part[-1], name) - _count(part[0], name) for part in parts)

    def per_step(name: str) -> float | None:
        return added(name) / steps if steps else None

    stages = {name: per_step(name) for name in end if name.startswith("seconds/")}
    return {
        "run": str(path),
        "steps": steps,
        "seconds": seconds,
        "seconds_per_step": seconds / steps if steps else None,
        "bytes_per_step": per_step("bytes_sent"),
        "parts_per_step": {
            name.removeprefix("bytes_"): per_step(name)
            for name in ("bytes_values", "bytes_indices", "bytes_dense", "bytes_headers")
        },
        "wire_ratio": _ratio(parts),
        "steady_wire_ratio": _ratio(parts, "steady_"),
        "realised_density": end.get("realised_density"),
        "skipped_steps": added("skipped_steps"),
        "stage_seconds_per_step": {name.removeprefix("seconds/"): value for name, value in stages.items()},
        "values": lines[-1]["values"],
    }


def sent(lines: Sequence[Line]) -> list[float]:
    """Bytes sent until each line, in all parts of the run."""
    found: list[float] = []
    before = 0.0  # in the parts that ended
    for part in _parts(lines):
        found += [before + _count(line, "bytes_sent") for line in part]
        before = found[-1]
    return found


def _parts(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each optimizer: one that was made for a resumed run counts from nothing."""
    parts: list[list[Line]] = []
    for line in lines:
        if not parts or any(_count(line, name) < _count(parts[-1][-1], name) for name in ("steps", "bytes_sent")):
            parts.append([])
        parts[-1].append(line)
    return parts


def _count(line: Line, name: str) -> float:
    return float(line["stats"].get(name, 0.0))


def _ratio(parts: Sequence[Sequence[Line]], stretch: str = "") -> float | None:
    """Dense float32 bytes over those sent, of all parts; ``stretch`` is ``"steady_"`` for what follows warm-up."""
    ends = [part[-1]["stats"] for part in parts]
    names = (f"{stretch}bytes_sent", f"{stretch}dense_equivalent_bytes")
    if all(end.get("bytes_sent") == 0.0 for end in ends):
        return None
    if len(ends) == 1 or any(name not in end for end in ends for name in names):  # logs of before have no such sums
        ratio: float | None = ends[-1].get(f"{stretch}wire_ratio")
        return ratio
    total, dense = (sum(float(end[name]) for end in ends) for name in names)
    if stretch and not dense:  # warm-up is not over
        return _ratio(parts)
    return dense / total if total else None
