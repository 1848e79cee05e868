"""``ringprune simulate``: rows as documented, a battery that continues, a page that is written from the store."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringprune import __main__
from ringprune.errors import DependencyError
from ringprune.simulation import workers
from ringprune.simulation.battery import Battery
from ringprune.simulation.document import document
from ringprune.simulation.log import log
from ringprune.simulation.methods import BUDGETS, Method, budget_name, methods
from ringprune.simulation.rows import left_behind, rows_of
from ringprune.simulation.store import Key, Store
from ringprune.simulation.table import _line, front
from ringprune.simulation.tasks import TASKS, Task
from ringprune.simulation.workers import Ahead, make_runs
from tests.simulation.formula import formula, parabola

FIELDS = ["task", "policy", "ranks", "density", "learning_rate", "best", "value", "standard_error", "seeds"]
FIELDS += ["bytes_per_step", "wire_ratio", "budget"]
ROOT = Path(__file__).resolve().parents[2]


def accuracy(folder: Path, *arguments: str) -> int:
    words = ["--task", "tiny", "--ranks", "4", "--jobs", "0", "--store", str(folder / "runs"), *arguments]
    return __main__.main(["simulate", "accuracy", *words])


def write_page(folder: Path) -> int:
    return __main__.main(["simulate", "accuracy", "--store", str(folder / "runs"), "--document", str(folder)])


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "rows").read_text())
    return found


# -- the command ------------------------------------------------------------------------------------------------------


def test_rows_hold_exactly_what_is_documented(tiny: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ("dense", "random_k:min_numel=1")
    out = str(tmp_path / "rows")
    assert accuracy(tmp_path, "--policy", *methods, "--budget", "1/4", "1/1000000", "--json", out) == 0
    found = rows(tmp_path)
    valued = [row for row in found if row["value"] is not None]
    assert all(list(row) == FIELDS for row in valued)
    assert all(list(row) == [*FIELDS, "reason"] for row in found if row not in valued)
    assert {(row["policy"], row["budget"]) for row in valued} == {("dense", 1.0), *((m, 0.25) for m in methods[1:])}
    for key in ("task", "policy"):
        assert all(isinstance(row[key], str) for row in found)
    best = [row for row in valued if row["best"]]
    assert len(best) == 2, "one learning rate of each is the best"
    assert all(row["seeds"] == 2 and row["standard_error"] >= 0 for row in best)
    for row in best:
        others = [r["value"] for r in valued if (r["policy"], r["budget"]) == (row["policy"], row["budget"])]
        assert row["value"] == min(others)
    assert {row["budget"] for row in found if row["value"] is None} == {1e-6}
    shown = capsys.readouterr().out
    assert "mean squared error" in shown
    assert "times the budget" in shown


def test_a_finished_table_takes_no_runs(tiny: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "--quick",
        "--policy",
        "dense",
        "random_k:min_numel=1",
        "--budget",
        "1/4",
        "--json",
        str(tmp_path / "rows"),
    )
    assert accuracy(tmp_path, *arguments) == 0
    before = rows(tmp_path)
    monkeypatch.setattr(workers, "run", lambda key: pytest.fail("made again"))
    assert accuracy(tmp_path, *arguments) == 0
    assert accuracy(tmp_path, *arguments, "--show") == 0
    assert rows(tmp_path) == before
    assert [row["seeds"] for row in before] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "iwq"), "neither a method"),
        (("--policy", "iwp:densty=1"), "did you mean 'density'"),
        (("--policy", "iwp:density=0.1"), "density is solved for"),
        (("--document", "docs"), "--document writes the whole page, of all cells: leave --task away"),
        (("--log", "--json", "-"), "nothing else: leave --json away"),
        (("--log", "--plots", "."), "nothing else: leave --plots away"),
    ],
)
def test_mistakes_are_named(
    tiny: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], complaint: str
) -> None:
    assert accuracy(tmp_path, *arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "where"), [("--plots", "nowhere/plots"), ("--plots", "file"), ("--store", "nowhere/runs")]
)
def test_what_cannot_be_written_is_refused_before_any_run(
    option: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plots were refused, by a traceback of matplotlib, when all runs had been made: days on two cores."""
    (tmp_path / "file").touch()
    for command in (["accuracy"], ["run", "--task", "digits", "--policy", "dense", "--rate", "1"]):
        if command[0] == "run" and option == "--plots":
            continue
        with pytest.raises(SystemExit) as stopped:
            __main__.main(["simulate", *command, option, str(tmp_path / where)])
        assert stopped.value.code == 2
        assert "can be written to" in capsys.readouterr().err


def test_no_run_is_made_where_plots_cannot_be(
    tiny: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    store = tmp_path / "runs.jsonl"
    words = ["--task", tiny.name, "--policy", "dense", "--quick", "--jobs", "0", "--store", str(store)]
    assert __main__.main(["simulate", "accuracy", *words, "--plots", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not store.exists()


def test_single_runs_are_shown_however_short(tiny: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No command showed them: the log took what is short for one of its own probes."""
    words = ["--task", "tiny", "--ranks", "4", "--jobs", "0", "--store", str(tmp_path / "runs")]
    assert __main__.main(["simulate", "run", *words, "--policy", "dense", "--rate", "0.1", "0.2", "--steps", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in table if line.startswith("tiny")] == [["tiny", "4", "2"]] * 2
    assert accuracy(tmp_path, "--log") == 0
    assert capsys.readouterr().out.count("| tiny | 4 | 2 | `dense` |") == 2


@pytest.mark.parametrize("share", ["0", "2", "1/0", "half"])
def test_a_budget_is_a_share(tiny: Task, tmp_path: Path, share: str) -> None:
    with pytest.raises(SystemExit):
        accuracy(tmp_path, "--budget", share)


@pytest.mark.parametrize("words", [("--ranks", "1"), ("--seeds", "0"), ("--jobs", "-1"), ("--jobs", "two")])
def test_counts_are_checked(tiny: Task, tmp_path: Path, words: Sequence[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy(tmp_path, *words)


def test_a_run_that_fails_is_named_and_stops_no_other(
    tiny: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = workers.run

    def sometimes(key: Key) -> dict[str, Any]:
        if key.learning_rate == 0.2:
            raise OSError("disk on fire")
        return real(key)

    monkeypatch.setattr(workers, "run", sometimes)
    words = ["--task", "tiny", "--ranks", "4", "--jobs", "0", "--store", str(tmp_path / "runs")]
    status = __main__.main(["simulate", "run", *words, "--policy", "dense", "--rate", "0.1", "0.2", "0.4"])
    assert status == 1
    assert "rate 0.2 seed 0: FAILED: OSError: disk on fire" in capsys.readouterr().err
    assert sorted(r["learning_rate"] for r in Store(tmp_path / "runs").records().values()) == [0.1, 0.4]


# -- continuing -------------------------------------------------------------------------------------------------------

SMALL = (Method("dense", "dense", "", solved=None), Method("iwp", "iwp:roots=all,min_numel=1", ""))


def all_rows(battery: Battery, store: Store) -> list[dict[str, Any]]:
    return [row for study in battery.studies(store.records()) for row in rows_of(study)]


@pytest.mark.parametrize("stops", [(1,), (2, 3), (5, 1, 1)])
def test_what_was_stopped_continues_to_the_same_rows(
    tiny: Task, tmp_path: Path, stops: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "run", formula(lambda density: 35000 * density**0.9, parabola(0.2, noise=0.5)))
    battery = Battery([tiny], SMALL, [1 / 4, 1 / 10], 4, seeds=3)
    straight, stopped = Store(tmp_path / "straight"), Store(tmp_path / "stopped")
    whole = list(make_runs(battery.plan, straight, 0))
    for after in stops:
        list(islice(make_runs(battery.plan, stopped, 0), after))
    rest = list(make_runs(battery.plan, stopped, 0))
    assert len(rest) == len(whole) - sum(stops), "nothing is run twice"
    assert all_rows(battery, stopped) == all_rows(battery, straight)
    assert whole[-1].ahead == Ahead(0, {"tiny": 0})


def test_real_runs_continue_to_the_same_rows(tiny: Task, tmp_path: Path) -> None:
    battery = Battery([tiny], SMALL[1:], [1 / 4], 4, quick=True)
    straight, stopped = Store(tmp_path / "straight"), Store(tmp_path / "stopped")
    list(make_runs(battery.plan, straight, 0))
    list(islice(make_runs(battery.plan, stopped, 0), 3))
    list(make_runs(battery.plan, stopped, 0))
    assert all_rows(battery, stopped) == all_rows(battery, straight)


@pytest.mark.slow
def test_a_battery_that_is_killed_continues(tmp_path: Path) -> None:
    """The real command with a worker process, killed without warning after its first run."""
    command = [sys.executable, "-m", "ringprune", "simulate", "run", "--task", "digits", "--policy", "dense"]
    command += ["--rate", "0.05", "0.1", "0.2", "--steps", "4", "--ranks", "2", "--store", str(tmp_path / "runs")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        assert "left" in first.stderr.readline()
        os.kill(first.pid, signal.SIGKILL)
    there = Store(tmp_path / "runs").records()
    assert 1 <= len(there) < 3
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    after = Store(tmp_path / "runs").records()
    assert sorted(record["learning_rate"] for record in after.values()) == [0.05, 0.1, 0.2]
    assert {digest: after[digest] for digest in there} == there, "what was there stays as it was"


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_written_from_the_store(tiny: Task, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "accuracy.md"
    page.write_text((ROOT / "docs" / "accuracy.md").read_text())
    battery, store = Battery([tiny], SMALL, [1 / 4], 4), Store(tmp_path / "runs")
    list(make_runs(battery.plan, store, 0))
    records = store.records()
    written = document(tmp_path, battery.studies(records), records)
    assert {path.name for path in written} == {
        "accuracy.md",
        "accuracy.json",
        "accuracy_curves.png",
        "accuracy_front.png",
    }
    text = page.read_text()
    assert "### tiny" in text
    assert "`iwp:roots=all,min_numel=1`" in text
    assert json.loads((tmp_path / "accuracy.json").read_text()) == all_rows(battery, store)
    document(tmp_path, battery.studies(records), records)
    assert page.read_text() == text, "writing again changes nothing"
    assert len(log(records.values())[1]) >= 6
    (said,) = front(battery.studies(records))
    assert f"* {said}" in text and said.startswith("tiny at 1/4: dense apart, iwp was the only method")


def test_the_page_counts_the_cells_that_nobody_has_begun(tiny: Task, tmp_path: Path) -> None:
    """They were left out, so that iwp was on the front where it was alone."""
    pytest.importorskip("matplotlib")
    (tmp_path / "accuracy.md").write_text((ROOT / "docs" / "accuracy.md").read_text())
    battery, store = Battery([tiny], SMALL, [1 / 4], 4), Store(tmp_path / "runs")
    list(make_runs(battery.plan, store, 0))
    whole = Battery([tiny], [*SMALL, Method("dgc", "dgc:min_numel=1", "")], [1 / 4], 4)
    records = store.records()
    document(tmp_path, whole.studies(records), records)
    assert "* tiny at 1/4: nothing to compare iwp with; of 1 cells" in (tmp_path / "accuracy.md").read_text()


def test_a_page_without_markers_is_left_alone(tiny: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_page(tmp_path) == 2
    assert "there is no accuracy.md" in capsys.readouterr().err
    (tmp_path / "accuracy.md").write_text("mine")
    assert write_page(tmp_path) == 2
    assert "needs one pair" in capsys.readouterr().err
    assert (tmp_path / "accuracy.md").read_text() == "mine"


def test_a_page_is_left_alone_where_nothing_can_be_drawn(
    tiny: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was rewritten, beside plots of before."""
    (tmp_path / "accuracy.md").write_text((ROOT / "docs" / "accuracy.md").read_text())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_page(tmp_path) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert (tmp_path / "accuracy.md").read_text() == (ROOT / "docs" / "accuracy.md").read_text()


def test_rows_of_before_stay_where_nothing_is_done(
    tiny: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped --store left an empty list in their place."""
    (tmp_path / "rows").write_text("before")
    assert accuracy(tmp_path, "--show", "--json", str(tmp_path / "rows")) == 0
    assert (tmp_path / "rows").read_text() == "before"
    assert "there are no rows" in capsys.readouterr().err


def test_data_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback: runs are asked for what they are made of before any is made."""
    monkeypatch.setattr("ringprune.simulation.run.version_of", missing)
    words = ["--task", "digits", "--policy", "dense", "--rate", "1", "--store", str(tmp_path / "runs")]
    assert __main__.main(["simulate", "run", *words]) == 2
    assert "ringprune simulate run: scikit-learn is missing" in capsys.readouterr().err


def missing(task: Task) -> str:
    raise DependencyError("scikit-learn is missing")


def test_the_committed_page_is_that_of_the_committed_runs() -> None:
    """Rows and page are not written by hand."""
    battery = Battery(list(TASKS.values()), methods(), BUDGETS, 8)
    expected = all_rows(battery, Store(ROOT / "docs" / "accuracy_runs.jsonl"))
    committed = json.loads((ROOT / "docs" / "accuracy.json").read_text())
    same_text = {row["task"] for row in committed} <= {row["task"] for row in expected}
    if not same_text:
        pytest.skip("the runs were made on the source text of another version of Python")
    assert committed == expected


def test_budgets_have_names() -> None:
    assert [budget_name(budget) for budget in (1.0, *BUDGETS)] == ["1", "1/50", "1/150", "1/300", "1/600"]
    assert [budget_name(1 / 62.5), budget_name(1 / 49)] == ["1/62.5", "1/49"], "no two budgets share a name"


def cells(values: dict[str, list[float] | None]) -> list[Any]:
    """A made-up cell for each method, of the same budget; one without values is not finished."""
    task = SimpleNamespace(name="tiny", higher_is_better=True)
    made = []
    for name, seeds in values.items():
        runs = SimpleNamespace(records=[{"value": value} for value in seeds or ()])
        cell = SimpleNamespace(task=task, method=SimpleNamespace(name=name), budget=0.25, ranks=4)
        made.append(SimpleNamespace(cell=cell, best=0.1 if seeds else None, reason=None, runs={0.1: runs}))
    return made


def test_iwp_is_on_the_front_only_of_what_is_finished() -> None:
    """The page said so where the only other finished row was that of dense, which is no competitor."""
    assert list(front(cells({"iwp": [1.0, 2.0], "dgc": None}))) == [
        "tiny at 1/4: nothing to compare iwp with; of 1 cells with no more bytes 0 are finished"
    ]
    assert list(front(cells({"iwp": [1.0, 2.0], "dgc": [0.5, 1.5], "mipd": None}))) == [
        "tiny at 1/4: iwp is not beaten; of 2 cells with no more bytes 1 are finished"
    ]
    assert list(front(cells({"iwp": [1.0, 2.0], "dgc": [1.5, 2.6]}))) == [
        "tiny at 1/4: iwp is beaten by dgc at 1/4 by 0.5500; of 1 cells with no more bytes 1 are finished"
    ]


def with_budgets(values: dict[tuple[str, float], list[float] | None]) -> list[Any]:
    """As :func:`cells`, of several budgets."""
    made = []
    for (name, budget), seeds in values.items():
        (one,) = cells({name: seeds})
        one.cell.budget = budget
        made.append(one)
    for one in made[1:]:
        one.cell.task = made[0].cell.task
    return made


def test_a_method_that_is_worse_with_more_bytes_is_counted_apart() -> None:
    iwp: dict[tuple[str, float], list[float] | None] = {("iwp", 0.25): [3.0, 3.1], ("iwp", 0.125): [2.0, 2.1]}
    worse = with_budgets(iwp | {("dgc", 0.25): [1.0, 1.11], ("dgc", 0.125): None})
    assert [left_behind(study, worse) for study in worse] == [False, False, False, True]
    assert _line(worse[3], worse)[:3] == ["dgc", "1/8", "left for last: worse with more bytes"]
    assert list(front(worse)) == [
        "tiny at 1/4: iwp is on the Pareto front; of 2 cells with no more bytes 1 are finished, and 1 are of methods "
        "that were worse with more bytes",
        "tiny at 1/8: iwp is on the Pareto front; of 1 cells with no more bytes 0 are finished, and 1 are of methods "
        "that were worse with more bytes",
    ]
    for close in (
        [2.5, 2.6],
        [1.9, 2.06],
        [1.0, 2.8],
        [1.0],
    ):  # better than half the bytes' iwp, by chance, or one seed
        near = with_budgets(iwp | {("dgc", 0.25): close, ("dgc", 0.125): None})
        assert not any(left_behind(study, near) for study in near)
        assert list(front(near))[1].startswith("tiny at 1/8: nothing to compare iwp with")


def test_a_difference_of_one_standard_error_is_no_defeat() -> None:
    """One of these was, by the last bit of a float."""
    iwp, other = [98.75, 98.5, 98.5, 98.5, 98.75], [99.0, 98.5, 98.25, 98.75, 99.0]
    assert list(front(cells({"iwp": iwp, "local_sgd": other}))) == ["tiny at 1/4: iwp is on the Pareto front"]
