"""Rows of the table, for programs, and comparisons between them over the same seeds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ringprune.simulation.cell import Runs
from ringprune.simulation.study import Study

__all__ = ["Paired", "Row", "left_behind", "paired", "reference_of", "rows_of", "standard_error"]

Row = dict[str, Any]

BEHIND = 3.0
"""Paired standard errors: with three seeds one in twenty such differences would be chance."""


def rows_of(study: Study) -> Iterator[Row]:
    """A row for each learning rate tried, ascending; one without a rate where the budget cannot be kept."""
    cell = study.cell
    same = {"task": cell.task.name, "policy": cell.method.name, "ranks": cell.ranks}
    if study.reason is not None and not study.runs:
        yield same | _figures(None, None, study) | {"reason": study.reason}
    for rate, runs in sorted(study.runs.items()):
        if runs.records:
            yield same | _figures(rate, runs, study) | ({"reason": "diverged"} if runs.mean is None else {})


def _figures(rate: float | None, runs: Runs | None, study: Study) -> Row:
    whole = runs is not None and runs.mean is not None
    values = [record["value"] for record in runs.records] if runs is not None and whole else []
    sent = runs.bytes_sent if runs is not None and whole else None
    return {
        "density": None if runs is None else runs.spec.policy().density.target,
        "learning_rate": rate,
        "best": rate is not None and rate == study.best,
        "value": fmean(values) if values else None,
        "standard_error": standard_error(values),
        "seeds": 0 if runs is None else len(runs.records),
        "bytes_per_step": None if sent is None else sent / study.cell.steps,
        "wire_ratio": None if sent is None else study.cell.dense_bytes / sent,
        "budget": study.cell.budget,
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for fewer than two values."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


@dataclass(frozen=True)
class Paired:
    """By how much one method's value exceeds another's, seed by seed.

    Attributes:
        difference: mean over the seeds that both have.
        error: its standard error; None with one seed.
        seeds: how many.
    """

    difference: float
    error: float | None
    seeds: int


def paired(study: Study, reference: Study) -> Paired | None:
    """Compare the best of two cells; None where one of them has none, or is not done."""
    if study.best is None or reference.best is None:
        return None
    pairs = zip(study.runs[study.best].records, reference.runs[reference.best].records, strict=False)
    differences = [one["value"] - other["value"] for one, other in pairs]
    return Paired(fmean(differences), standard_error(differences), len(differences))


def reference_of(study: Study, studies: Sequence[Study], name: str) -> Study | None:
    """The cell of a reference that a study is compared with: of the same task, and of the same budget if it has one."""
    same = [s for s in studies if s.cell.task is study.cell.task and s.cell.method.name == name]
    return next((s for s in same if s.cell.budget in (1.0, study.cell.budget)), None)


def left_behind(study: Study, studies: Sequence[Study]) -> bool:
    """Whether a method was worse with more bytes already than ``iwp`` with those of this cell.

    Worse by more than ``BEHIND`` paired standard errors. That it would be better with fewer bytes nobody expects; the
    cell is left for last.
    """
    iwp = reference_of(study, studies, "iwp")
    if iwp is None or study.cell.method.name in ("iwp", "dense"):
        return False
    sign = -1 if study.cell.task.higher_is_better else 1
    same = [s for s in studies if s.cell.task is study.cell.task and s.cell.method.name == study.cell.method.name]
    found = [paired(other, iwp) for other in same if other.cell.budget > study.cell.budget]
    return any(each and each.error is not None and sign * each.difference > BEHIND * each.error for each in found)
