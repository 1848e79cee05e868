"""One cell of the table: a method on a task within a budget, and the runs that were made of it."""

from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from ringprune.simulation.methods import Method
from ringprune.simulation.spec import Spec
from ringprune.simulation.store import Key
from ringprune.simulation.tasks import TASKS, Task
from ringprune.simulation.workers import version_of

__all__ = ["Cell", "Record", "Runs", "entries"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A method on a task within a budget.

    Attributes:
        task: what is trained.
        method: how.
        budget: share of the bytes that dense fp32 sends in the whole run.
        ranks: how many.
        seeds: runs that the best learning rate gets.
        steps: of each run.
        rates: the grid of learning rates.
        growth: rates by which the grid may grow at each end.
    """

    task: Task
    method: Method
    budget: float
    ranks: int
    seeds: int
    steps: int
    rates: tuple[float, ...]
    growth: int = 3

    @property
    def spec(self) -> Spec:
        """The method's, without what is solved for."""
        return self.method.at(self.task.name, self.budget)

    @property
    def solved(self) -> str | None:
        """What the budget decides."""
        return self.method.solved_at(self.task.name, self.budget)

    @property
    def middle(self) -> float:
        """The middle rate of the grid, the lower one of two: budgets are solved for at this rate."""
        return self.rates[(len(self.rates) - 1) // 2]

    @property
    def allowed(self) -> float:
        """Bytes that a rank may send in a run."""
        return self.budget * self.dense_bytes

    @property
    def dense_exchange(self) -> float:
        """Bytes that a rank sends in a dense fp32 allreduce of all gradients."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * entries(self.task.name)

    @property
    def dense_bytes(self) -> float:
        """The same for a run."""
        return self.steps * self.dense_exchange

    def key(self, spec: Spec, rate: float, seed: int, steps: int | None = None) -> Key:
        """The run of a specification at a rate and a seed."""
        version = version_of(self.task)
        return Key(self.task.name, version, spec.resolved, self.ranks, rate, seed, steps or self.steps)


@dataclass
class Runs:
    """The finished runs of a cell at one learning rate, seed by seed from 0.

    Attributes:
        spec: what was run.
        records: their outcomes.
    """

    spec: Spec
    records: list[Record] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Mean value over the seeds; None if a run diverged, or there is none."""
        values = [record["value"] for record in self.records]
        return None if None in values or not values else fmean(values)

    @property
    def bytes_sent(self) -> float:
        """Mean bytes of a run; of one that diverged, what it sent until then."""
        return fmean(record["bytes_sent"] for record in self.records)


@cache
def entries(task: str) -> int:
    """Parameters of a task's model."""
    return sum(parameter.numel() for parameter in TASKS[task].model().parameters())
