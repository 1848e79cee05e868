"""Writes what the store holds into docs/accuracy.md, between markers, and beside it rows and plots."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringprune.drawing import load_pyplot
from ringprune.errors import ConfigurationError
from ringprune.simulation import figures, table
from ringprune.simulation.log import log_page, markdown
from ringprune.simulation.methods import Method
from ringprune.simulation.rows import rows_of
from ringprune.simulation.study import Study
from ringprune.whole_file import write_json, write_whole

__all__ = ["document"]

PAGE, ROWS, IMAGES = "accuracy.md", "accuracy.json", "images"

Record = dict[str, Any]


def document(folder: Path, studies: Sequence[Study], records: Mapping[str, Record]) -> list[Path]:
    """Bring the page, the rows and the plots up to date.

    Args:
        folder: where the page is.
        studies: the cells of the table.
        records: all finished runs.

    Returns:
        What was written.

    Raises:
        ConfigurationError: the page is not there, or lacks a pair of markers.
        DependencyError: matplotlib is missing.
    """
    load_pyplot()  # or nothing is written
    page = folder / PAGE
    if not page.exists():
        raise ConfigurationError(f"--document {folder}: there is no {PAGE}")
    parts: dict[str, Callable[[], str]] = {
        "methods": lambda: _methods(studies),
        "tables": lambda: _tables(studies),
        "log": lambda: log_page(records.values()),
    }
    text = page.read_text()
    for name, make in parts.items():
        text = _between(text, name, make(), page)
    write_whole(text, page)
    write_json([row for study in studies for row in rows_of(study)], folder / ROWS)
    (folder / IMAGES).mkdir(exist_ok=True)
    return [page, folder / ROWS, *figures.draw(studies, folder / IMAGES)]


def _between(text: str, name: str, new: str, page: Path) -> str:
    markers = re.compile(rf"(<!-- {name}: .*?-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if len(markers.findall(text)) != 1:
        raise ConfigurationError(f"{page}: needs one pair of <!-- {name}: ... --> and <!-- end of {name} -->")
    return markers.sub(lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text)


def _methods(studies: Sequence[Study]) -> str:
    methods: dict[str, Method] = {study.cell.method.name: study.cell.method for study in studies}
    lines = [[method.name, method.says, _specs(method), method.solves] for method in methods.values()]
    return markdown(("method", "what it is", "specification", "solved for"), lines)


def _specs(method: Method) -> str:
    return "; ".join([f"`{method.spec}`", *(f"{where}: `{spec}`" for where, spec in method.other.items())])


def _tables(studies: Sequence[Study]) -> str:
    parts = []
    for task in dict.fromkeys(study.cell.task for study in studies):
        own = [study for study in studies if study.cell.task is task]
        parts.append(f"### {task.name}\n")
        parts.append(
            f"{task.metric[0].upper()}{task.metric[1:]}; {own[0].cell.ranks} ranks, {own[0].cell.steps} steps."
        )
        begun = [study for study in own if study.runs or study.reason]
        parts.append(_made_on(own) + "\n")
        parts.append(markdown(*table.lines(begun)) + "\n" if begun else "")
        parts += [f"* {sentence}" for sentence in table.front(own)]
        parts.append("")
    if any(study.best is not None for study in studies):
        parts += ["### Plots\n", f"![best value against bytes sent]({IMAGES}/{figures.FRONT})\n"]
        parts += [f"![loss against steps]({IMAGES}/{figures.CURVES})\n"]
    return "\n".join(parts).rstrip()


def _made_on(studies: Sequence[Study]) -> str:
    """When and on what the runs of a task were made."""
    made = [record["made"] for study in studies for runs in study.runs.values() for record in runs.records]
    if not made:
        return "No runs yet."
    dates = sorted({each["date"] for each in made})
    on = sorted({f"{m['processor']}, torch {m['torch']}, Python {m['python']}" for m in made})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Made {when} on {'; '.join(on)}."
