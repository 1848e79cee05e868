"""Policies of a user's own on a command line: a function that makes one, with its arguments, and mistakes in it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringprune as rp
from ringprune import __main__
from ringprune.importance import Magnitude
from ringprune.simulation.methods import methods
from ringprune.simulation.spec import parse, renewed

MODULE = "policies_of_a_test"
SOURCE = """
from dataclasses import replace
import ringprune as rp
from ringprune.importance import Magnitude

def mine(density: float = 0.02, warmup: rp.Warmup | None = None) -> rp.Policy:
    return replace(rp.IWP(density, roots="all", warmup=warmup), name="mine", score=Magnitude())

def needs(density): return mine(density)
def number(): return 3
def broken(): return 1 / 0
def hidden(density: "Later" = 0.1): return mine(density)
one = mine()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of policies in it; Python's path does not know it yet."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    renewed.cache_clear()
    yield tmp_path
    sys.modules.pop(MODULE, None)


def test_a_function_of_ones_own_is_read_as_ours_are() -> None:
    spec = parse(f"{MODULE}:mine:density=0.1,warmup=30,warmup.start=0.5")
    policy = spec.policy()
    assert (policy.name, policy.score, policy.density.target) == ("mine", Magnitude(), 0.1)
    assert policy.density.warmup == rp.Warmup(30, 0.5)
    assert str(spec) == f"{MODULE}:mine:density=0.1,warmup=30,warmup.start=0.5"
    assert parse(spec.resolved) == spec
    assert parse(f"{MODULE}:mine").resolved == f"{MODULE}:mine:density=0.02,warmup=none"
    assert parse(f" {MODULE} : needs : density=0.3 ").policy().density.target == 0.3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}:mine:densty=0.1", "argument 'densty': .* takes density, warmup, flush; did you mean 'density'"),
        ("{}:mine:density=2", "density=2"),
        ("{}:mine:density=0.1:warmup=3", "behind one colon"),
        ("{}:needs", "needs.*: TypeError: .*'density'"),
        ("{}:number", "number.*returned 3, which is no ringprune.Policy"),
        ("{}:broken", "broken.*: ZeroDivisionError"),
        ("{}:hidden", "hidden.*annotations cannot be read: .*Later"),
        ("{}:one", "it is a Policy; a function"),
        ("{}:nothing", "as MODULE:FUNCTION: AttributeError: .*nothing"),
        ("no_module_of_a_test:mine", "as MODULE:FUNCTION: ModuleNotFoundError: .*no_module_of_a_test"),
        ("mine", "policy 'mine': the policies are MODULE:FUNCTION, of your own, and dense"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(rp.ConfigurationError, match=complaint):
        parse(text.format(MODULE))


def test_every_command_takes_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, store = f"{MODULE}:mine:density=0.1", "store.jsonl"
    asked = ["advise", "--model", "resnet18", "--ranks", "4", "--rate", "1gbit", "--json", "-"]
    assert __main__.main([*asked, "--methods", policy]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["dense", policy]
    run = ["simulate", "run", "--task", "digits", "--rate", "0.1", "--steps", "2", "--ranks", "2", "--jobs", "0"]
    assert __main__.main([*run, "--policy", policy, "--store", store]) == 0
    assert policy in capsys.readouterr().out
    (method,) = methods([f"{MODULE}:mine"])
    assert (method.solved, method.at("digits", 0.02).accepts("density")) == ("density", True)


def test_reading_a_store_runs_nobodys_code(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text("raise SystemExit('it ran')")
    assert renewed(f"{MODULE}:mine:density=0.1") == f"{MODULE}:mine:density=0.1"
    assert MODULE not in sys.modules


@pytest.mark.parametrize("command", ["advise --model resnet18 --ranks 4 --rate 1gbit", "bench step --model resnet18"])
def test_what_only_simulations_do_is_refused_elsewhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``flush=1`` was taken and did nothing."""
    assert __main__.main([*command.split(), "--methods", "iwp:flush=1"]) == 2
    assert "'iwp:flush=1': flush is what ringprune simulate does" in capsys.readouterr().err
