"""Cells: bytes are solved to the budget, and the way through the learning rates is the same however one gets there."""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from ringprune.simulation.budget import exchanges_of, with_local_steps
from ringprune.simulation.cell import Cell
from ringprune.simulation.methods import Method
from ringprune.simulation.rows import paired, rows_of
from ringprune.simulation.spec import parse
from ringprune.simulation.store import Key
from ringprune.simulation.study import Study
from ringprune.simulation.tasks import TASKS, Task
from ringprune.simulation.workers import run
from tests.simulation.formula import Record, Runner, formula, parabola
from tests.simulation.tiny import RANKS

Records = dict[str, Record]

DENSE = Method("dense", "dense", "", solved=None)
IWP = Method("iwp", "iwp:roots=all,min_numel=1", "")


def cell(task: Task, method: Method, budget: float, **more: Any) -> Cell:
    settings = {"seeds": task.seeds, "steps": task.steps, "rates": task.learning_rates, "growth": 3} | more
    return Cell(task, method, budget, RANKS, **settings)


def finish(cell: Cell, runner: Runner, records: Records | None = None) -> tuple[Study, list[Key]]:
    """Make runs until none is wanted; the first one wanted at a time."""
    records, made = {} if records is None else records, []
    while wanted := Study(cell, records).wanted:
        key = wanted[0]
        assert key.digest not in records
        records[key.digest] = asdict(key) | runner(key)
        made.append(key)
    return Study(cell, records), made


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 / 5, 1 / 12])
@pytest.mark.parametrize("spec", ["iwp:roots=all", "iwp:roots=1,damping=0", "dgc", "random_k:warmup=2", "random_k"])
def test_real_runs_use_up_their_budget_and_no_more(tiny: Task, spec: str, budget: float) -> None:
    made = cell(tiny, Method("m", f"{spec},min_numel=1" if ":" in spec else f"{spec}:min_numel=1", ""), budget)
    study, _ = finish(made, run)
    (best,) = [row for row in rows_of(study) if row["best"]]
    assert best["seeds"] == 2
    assert best["wire_ratio"] * budget >= 1
    # A density moves in steps of an entry per tensor and root; here that is more than 2 % of what is sent.
    entries = budget * 6760
    assert best["wire_ratio"] * budget <= 1 / 0.98 + 3 * RANKS / entries


def test_local_steps_are_solved_for_where_the_specification_has_a_density(tiny: Task) -> None:
    method = Method("m", "iwp:min_numel=1", "", other={tiny.name: "iwp:density=1,local_steps=1,values=int8"})
    there = cell(tiny, method, 1 / 12)
    assert (there.solved, cell(tiny, replace(method, other={}), 1 / 12).solved) == ("local_steps", "density")
    study, _ = finish(there, run)
    (best,) = [row for row in rows_of(study) if row["best"]]
    assert best["density"] == 1 and best["wire_ratio"] >= 12


def test_a_specification_that_says_everything_may_send_less_and_never_more(tiny: Task) -> None:
    everything = {tiny.name: "iwp:density=1,local_steps=4,values=int8"}
    method = Method("m", "iwp:min_numel=1", "", other=everything, fixed=frozenset({tiny.name}))
    there = cell(tiny, method, 1 / 12)
    assert there.solved is None and "tiny: nothing" in method.solves
    study, _ = finish(there, run)
    (best,) = [row for row in rows_of(study) if row["best"]]
    assert best["policy"] == "m" and best["density"] == 1
    assert 14 < best["wire_ratio"] < 17, "an exchange in 4 steps, in 8 bits"
    over, made = finish(cell(tiny, method, 1 / 17), run)
    assert over.reason is not None and "times the budget" in over.reason and len(made) == 1


@pytest.mark.parametrize("power", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("warmup", ["", ",warmup=6,warmup.start=0.5"])
@pytest.mark.parametrize("late", [1.0, 1.3, 0.7])
def test_bytes_are_solved_within_two_percent(tiny: Task, power: float, warmup: str, late: float) -> None:
    """Also where long runs send more or less than short ones."""

    def runner(key: Key) -> Record:
        more = late if key.steps == tiny.steps else 1.0
        return formula(lambda density: more * 30000 * density**power, parabola(0.2))(key)

    made = cell(tiny, Method("m", f"iwp:roots=all{warmup}", ""), 1 / 6)
    study, keys = finish(made, runner)
    assert study.best is not None
    sent = study.runs[study.best].bytes_sent
    assert 0.98 * made.allowed <= sent <= made.allowed
    assert len([key for key in keys if key.steps == tiny.steps]) <= 3 + 1 + 3, "rates, a seed, and corrections"


def test_bytes_that_jump_stay_below_the_budget(tiny: Task) -> None:
    runner = formula(lambda density: 2000.0 * math.ceil(100 * density), parabola(0.2))
    made = cell(tiny, IWP, 1 / 10)
    study, _ = finish(made, runner)
    assert study.best is not None
    assert study.runs[study.best].bytes_sent <= made.allowed


def test_a_budget_below_what_travels_dense_has_a_reason_and_no_value(tiny: Task) -> None:
    study, keys = finish(cell(tiny, IWP, 1e-5), formula(lambda density: 30000 * density, parabola(0.2)))
    (row,) = rows_of(study)
    assert (row["value"], row["learning_rate"], row["best"]) == (None, None, False)
    assert "travel dense" in row["reason"]
    assert all(key.steps < tiny.steps for key in keys), "only probes were made"


@pytest.mark.parametrize(("value", "reason"), [(1.0, "nothing is packed"), (None, "diverged in a probe")])
def test_a_probe_that_packs_nothing_is_a_reason(tiny: Task, value: float | None, reason: str) -> None:
    """It was divided by, in every run of the battery from then on: the store had it."""
    study, keys = finish(cell(tiny, IWP, 1 / 50), formula(lambda _: 0.0, lambda rate, seed: value))
    assert study.best is None and reason in str(study.reason)
    assert len(keys) == 1


def test_warm_up_counts(tiny: Task) -> None:
    made = cell(tiny, Method("m", "iwp:roots=all,warmup=20", ""), 1 / 50)
    study, _ = finish(made, formula(lambda density: 30000 * density, parabola(0.2)))
    assert "warm-up" in str(study.reason)


@pytest.mark.parametrize(("budget", "apart"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (1 / 50, 51), (1 / 600, 682)])
def test_local_steps_give_as_many_exchanges_as_fit_evenly(budget: float, apart: int) -> None:
    steps, exchange = 2048, 1000.0
    most = int(budget * steps)
    spec = with_local_steps(parse("dense"), [1.0] * steps, exchange, budget * steps * exchange)
    assert spec == parse(f"dense:local_steps={apart}")
    assert steps // apart <= most
    assert steps // apart > 0.98 * most - 1 or steps // (apart - 1) > most
    assert steps % apart <= steps // most, "little is left over"


def test_not_even_one_exchange_fits() -> None:
    assert with_local_steps(parse("dense"), [1.0] * 2048, 1000.0, 999.0) is None


@pytest.mark.parametrize("budget", [1.0, 0.4, 0.2, 1 / 50, 1 / 600])
def test_intervals_that_grow_are_counted_as_training_makes_them(budget: float) -> None:
    steps, exchange = 2048, 1000.0
    rates = [TASKS["digits"].rate(step, steps, 1.0) for step in range(steps)]
    spec = with_local_steps(parse("dense:local_steps=7,local_steps.growth=1.25"), rates, exchange, budget * steps * 1e3)
    assert spec is not None
    choice = spec.policy().local_steps
    assert choice is not None
    assert choice.growth == 1.25
    made = exchanges_of(spec, rates)
    assert made * exchange <= budget * steps * exchange
    assert exchanges_of(spec.exchanging_every(choice.count + 1), rates) < made, "little is left over"
    counts = range(1, choice.count)
    assert all(exchanges_of(spec.exchanging_every(count), rates) >= made for count in (*counts[:3], *counts[-3:]))


# -- learning rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.2, [0.1, 0.2, 0.4]),
        (0.8, [0.1, 0.2, 0.4, 0.8, 1.6]),
        (0.05, [0.025, 0.05, 0.1, 0.2, 0.4]),
        (100.0, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]),
    ],
)
def test_the_grid_grows_until_the_best_is_inside(tiny: Task, best: float, tried: list[float]) -> None:
    study, keys = finish(cell(tiny, DENSE, 1.0), formula(lambda density: 30000.0, parabola(best)))
    assert sorted(study.runs) == pytest.approx(tried)
    assert study.at_edge is (best == 100.0)
    assert study.best == pytest.approx(min(tried, key=lambda rate: abs(math.log(rate / best))))
    assert len(keys) == len(tried) + 1, "all rates at one seed, the best one at two"


def test_the_best_mean_has_all_seeds(tiny: Task) -> None:
    """A rate that was lucky at its first seed is not the best."""
    values = {(0.1, 0): 3.0, (0.2, 0): 2.0, (0.4, 0): 2.5, (0.2, 1): 4.0, (0.4, 1): 2.6}
    runner = formula(lambda density: 30000.0, lambda rate, seed: values[rate, seed])
    study, _ = finish(cell(tiny, DENSE, 1.0, growth=0), runner)
    assert study.best == 0.4
    rows = {row["learning_rate"]: row for row in rows_of(study)}
    assert [rows[rate]["seeds"] for rate in (0.1, 0.2, 0.4)] == [1, 2, 2]
    assert [row["best"] for row in rows.values()] == [False, False, True]
    assert min(row["value"] for row in rows.values()) == rows[0.4]["value"] == 2.55
    assert rows[0.4]["standard_error"] == pytest.approx(0.05)


def test_rates_that_diverge_are_never_the_best(tiny: Task) -> None:
    def value(rate: float, seed: int) -> float | None:
        return None if rate > 0.1 else 5 + rate

    study, _ = finish(cell(tiny, DENSE, 1.0), formula(lambda density: 30000.0, value))
    assert study.best is not None
    assert study.best < 0.1
    assert {row["learning_rate"]: row.get("reason") for row in rows_of(study)}[0.2] == "diverged"


def test_divergence_at_every_rate_is_a_reason(tiny: Task) -> None:
    study, _ = finish(cell(tiny, DENSE, 1.0), formula(lambda density: 30000.0, lambda rate, seed: None))
    assert study.best is None
    assert "diverged" in str(study.reason)
    assert len(study.runs) == 6


@pytest.mark.parametrize("seed", range(4))
def test_the_rows_do_not_depend_on_the_order_in_which_runs_are_made(tiny: Task, seed: int) -> None:
    runner = formula(lambda density: 35000 * density**0.9, parabola(0.2, noise=0.5))
    made, shuffled = cell(tiny, IWP, 1 / 10, seeds=3), random.Random(seed)
    straight, _ = finish(made, runner)
    records: Records = {}
    while wanted := list(Study(made, records).wanted):
        for key in shuffled.sample(wanted, shuffled.randint(1, len(wanted))):
            records[key.digest] = asdict(key) | runner(key)
    assert list(rows_of(Study(made, records))) == list(rows_of(straight))


def test_higher_is_better_where_the_task_says_so(tiny: Task) -> None:
    accuracy = replace(tiny, higher_is_better=True)
    values: Mapping[float, float] = {0.1: 90.0, 0.2: 95.0, 0.4: 80.0}
    runner = formula(lambda density: 30000.0, lambda rate, seed: values[rate] + seed)
    study, _ = finish(cell(accuracy, DENSE, 1.0), runner)
    assert study.best == 0.2


def test_pairs_are_of_the_same_seed(tiny: Task) -> None:
    """Where the seeds differ by much and the methods by little, the difference is known well."""
    noise = [0.0, 5.0, -3.0]
    one, _ = finish(
        cell(tiny, DENSE, 1.0, seeds=3), formula(lambda d: 3e4, lambda rate, s: parabola(0.2)(rate, s) + noise[s])
    )
    two, _ = finish(
        cell(tiny, IWP, 1 / 10, seeds=3),
        formula(lambda d: 3e4 * d, lambda rate, s: parabola(0.2)(rate, s) + noise[s] + 0.1 + 0.01 * s),
    )
    found = paired(two, one)
    assert found is not None
    assert found.difference == pytest.approx(0.11)
    assert found.error == pytest.approx(0.01 / 3**0.5)
    assert found.seeds == 3
