"""The table of the battery as text: a line for each method and budget, and the comparisons below it."""

from collections.abc import Iterator, Sequence

from ringprune.simulation.methods import budget_name
from ringprune.simulation.rows import left_behind, paired, reference_of, rows_of
from ringprune.simulation.study import Study

__all__ = ["REFERENCES", "front", "lines"]

REFERENCES = ("dense", "iwp")
"""Methods that every other is compared with, seed by seed."""

ROUNDING = 1e-9
"""Shares of correct answers are few numbers: a difference is often its own standard error, up to rounding."""

HEADINGS = ("method", "budget", "value", "seeds", "rate", "density", "kB/step", "wire ratio", "- dense", "- iwp")


def lines(studies: Sequence[Study]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings, and a line for each of the cells of one task."""
    return HEADINGS, [_line(study, studies) for study in studies]


def _line(study: Study, studies: Sequence[Study]) -> list[str]:
    cell = study.cell
    start = [cell.method.name, budget_name(cell.budget)]
    rows = [row for row in rows_of(study) if row["best"]]
    if not rows:
        return [*start, study.reason or _why_missing(study, studies), *[""] * (len(HEADINGS) - 3)]
    (row,) = rows
    digits = 2 if cell.task.higher_is_better else 4
    return [
        *start,
        _with_error(row["value"], row["standard_error"], digits),
        str(row["seeds"]),
        f"{row['learning_rate']:g}" + "*" * study.at_edge,
        f"{row['density']:.3g}",
        f"{row['bytes_per_step'] / 1e3:.3g}",
        f"{row['wire_ratio']:.1f}",
        *(_difference(study, reference_of(study, studies, name), digits) for name in REFERENCES),
    ]


def _why_missing(study: Study, studies: Sequence[Study]) -> str:
    if left_behind(study, studies):
        return "left for last: worse with more bytes"
    return "not finished" if study.runs else "not begun"


def _difference(study: Study, reference: Study | None, digits: int) -> str:
    found = None if reference is None or reference is study else paired(study, reference)
    return "" if found is None else _with_error(found.difference, found.error, digits, sign="+")


def _with_error(value: float, error: float | None, digits: int, sign: str = "") -> str:
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def front(studies: Sequence[Study]) -> Iterator[str]:
    """For each budget whether ``iwp`` is on the Pareto front of the methods that are finished, in a sentence."""
    for iwp in (study for study in studies if study.cell.method.name == "iwp"):
        where = f"{iwp.cell.task.name} at {budget_name(iwp.cell.budget)}"
        if iwp.best is None:
            yield f"{where}: iwp is not finished, or has no value"
            continue
        others = [study for study in studies if _competes(study, iwp)]
        done = [study for study in others if study.best is not None or study.reason is not None]
        beaten = [text for study in done if (text := _beats(study, iwp))]
        behind = [study for study in others if study not in done and left_behind(study, studies)]
        of = f"of {len(others)} cells with no more bytes {len(done)} are finished"
        if behind:
            of += f", and {len(behind)} are of methods that were worse with more bytes"
        if beaten:
            yield f"{where}: iwp is beaten by {', '.join(beaten)}; {of}"
        elif not others:
            yield f"{where}: dense apart, iwp was the only method asked for"
        elif len(done) + len(behind) == len(others):
            yield f"{where}: iwp is on the Pareto front" + (f"; {of}" if behind else "")
        else:
            compared = done or behind
            yield f"{where}: " + (f"iwp is not beaten; {of}" if compared else f"nothing to compare iwp with; {of}")


def _competes(study: Study, iwp: Study) -> bool:
    """Whether a cell is another method's on the same task, with no more bytes than the budget."""
    same = study.cell.task is iwp.cell.task and study.cell.budget <= iwp.cell.budget
    return same and study.cell.method.name != "iwp"


def _beats(study: Study, iwp: Study) -> str | None:
    """Whether a method is better by more than one paired standard error."""
    found = paired(study, iwp)
    if found is None:
        return None
    better = found.difference if iwp.cell.task.higher_is_better else -found.difference
    if better <= (found.error or 0.0) * (1 + ROUNDING):
        return None
    return f"{study.cell.method.name} at {budget_name(study.cell.budget)} by {better:.4f}"
