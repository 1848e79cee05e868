"""Reading what :class:`ringprune.StatsLog` wrote, and what a run comes to."""

import json
from pathlib import Path
from typing import Any

from ringprune.errors import ConfigurationError

__all__ = ["Line", "Row", "read", "row_of"]

Line = dict[str, Any]
Row = dict[str, Any]

NUMBERS, TABLES = ("calls", "elapsed_seconds"), ("values", "stats")  # tables are of numbers


def read(path: Path) -> list[Line]:
    """The lines of a file; a last one that was cut off, as a killed run leaves it, is left out.

    Raises:
        ConfigurationError: it cannot be read, or is no such file; names the line.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(texts) and lines:
                break
            raise ConfigurationError(f"{path}, line {number}: not JSON ({error})") from error
        if not _is_line(line):
            wanted = ", ".join((*NUMBERS, *TABLES))
            raise ConfigurationError(f"{path}, line {number}: not a line of ringprune.StatsLog ({wanted})")
        if lines and line["calls"] < lines[-1]["calls"]:
            raise ConfigurationError(
                f"{path}, line {number}: call {line['calls']:,} after call {lines[-1]['calls']:,}, so that it holds "
                "several runs; give each a file of its own"
            )
        lines.append(line)
    if not lines:
        raise ConfigurationError(f"{path}: no line of ringprune.StatsLog")
    return lines


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not all(isinstance(line.get(key), dict) for key in TABLES):
        return False
    numbers = [*(line.get(key) for key in NUMBERS), *(value for key in TABLES for value in line[key].values())]
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)


def row_of(path: Path, lines: list[Line]) -> Row:
    """What a run comes to: rates between its first line and its last, counters at its end."""
    first, last = lines[0], lines[-1]
    steps = last["calls"] - first["calls"]
    seconds = last["elapsed_seconds"] - first["elapsed_seconds"]
    stats, begin = last["stats"], first["stats"]

    def per_step(name: str) -> float | None:
        return (stats.get(name, 0.0) - begin.get(name, 0.0)) / steps if steps else None

    stages = {name: per_step(name) for name in stats if name.startswith("seconds/")}
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
        "wire_ratio": stats.get("wire_ratio"),
        "steady_wire_ratio": stats.get("steady_wire_ratio"),
        "realised_density": stats.get("realised_density"),
        "skipped_steps": stats.get("skipped_steps", 0.0) - begin.get("skipped_steps", 0.0),
        "stage_seconds_per_step": {name.removeprefix("seconds/"): value for name, value in stages.items()},
        "values": last["values"],
    }
