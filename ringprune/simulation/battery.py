"""The battery: every task with every method within every budget; what it wants next, and what it has found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ringprune.simulation.cell import Cell, Record
from ringprune.simulation.methods import Method
from ringprune.simulation.rows import left_behind
from ringprune.simulation.store import Key
from ringprune.simulation.study import Study
from ringprune.simulation.tasks import Task
from ringprune.simulation.workers import Ahead

__all__ = ["Battery"]

QUICK_STEPS, QUICK_SEEDS = 16, 2


class Battery:
    """The cells of the table.

    Args:
        tasks: what is trained.
        methods: how.
        budgets: shares of the bytes of dense; a method that has nothing to solve for gets all of them, once.
        ranks: how many.
        seeds: runs of the best learning rate; None takes the task's number.
        quick: few steps, one learning rate, two seeds: to see that it works.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        methods: Sequence[Method],
        budgets: Sequence[float],
        ranks: int,
        seeds: int | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self.cells: list[Cell] = []
        for task in tasks:
            grid = task.learning_rates
            settings: dict[str, Any] = {
                "seeds": QUICK_SEEDS if quick else seeds or task.seeds,
                "steps": QUICK_STEPS if quick else task.steps,
                "rates": grid[(len(grid) - 1) // 2 :][:1] if quick else grid,
                "growth": 0 if quick else 3,
            }
            self.cells += [Cell(task, m, 1.0, ranks, **settings) for m in methods if m.solved is None]
            solved = [method for method in methods if method.solved is not None]
            self.cells += [Cell(task, m, budget, ranks, **settings) for budget in budgets for m in solved]

    def studies(self, records: Mapping[str, Record]) -> list[Study]:
        """What the finished runs say, cell by cell."""
        return [Study(cell, records) for cell in self.cells]

    def plan(self, records: Mapping[str, Record]) -> tuple[Sequence[Key], Ahead]:
        """The runs wanted now, cell by cell, those that are left behind last, and what lies ahead."""
        studies = self.studies(records)
        studies = sorted(studies, key=partial(left_behind, studies=studies))
        steps = Counter[str]()
        for study in studies:
            steps[study.cell.task.name] += study.runs_ahead * study.cell.steps
        wanted = [key for study in studies for key in study.wanted]
        return wanted, Ahead(sum(study.runs_ahead for study in studies), steps)
