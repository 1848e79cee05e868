"""``ringprune profile``: scripts run as they are, what is written, what is said when it cannot be."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import ringprune as rp
from ringprune import __main__
from ringprune.profiles.format import read
from tests.mpi.launch import run_job

LOOP = """
import os, sys, torch
from torch import nn
print("arguments", sys.argv[1:], __name__)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""
WRAPPED = """
import horovod.torch as hvd
hvd.init()
import torch, ringprune as rp
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
named = model.named_parameters()
optimizer = {wrapped}
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    print("step", step, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def profiled(*words: str | Path) -> int:
    return __main__.main(["profile", "--warmup", "2", "--iterations", "3", *map(str, words)])


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_profile_is_written_and_shown(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = [*sys.argv], [*sys.path]
    assert profiled(script, "--lr", "0.1", "--name", "x") == 0
    assert (sys.argv, sys.path) == before
    out = capfd.readouterr().out
    assert "arguments ['--lr', '0.1', '--name', 'x'] __main__" in out
    assert "step 3\n" in out
    assert "step 4\n" not in out  # stopped inside the fifth
    profile = read(script.with_name("loop.profile.json"))
    assert (profile.model, [layer.parameters for layer in profile.layers]) == ("loop", [(48, 8), (16, 2)])
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    for told in ("loop.py", "float32", "5 x 6", "medians of 3 iterations", f"ringprune {rp.__version__}"):
        assert told in profile.provenance
    assert f"{4 * 74} bytes" in out
    assert "written: loop.profile.json" in out


def test_the_command_that_follows_is_told_and_works(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert profiled("--output", "my model.json", script) == 0
    lines = capfd.readouterr().out.splitlines()
    told = next(line for line in lines if "ringprune advise" in line).partition("     whether")[0]
    assert any("mpi_scripts/replay.py 'my model.json'" in line for line in lines)
    assert __main__.main(shlex.split(told)[1:]) == 0
    assert "my model.json" in capfd.readouterr().out
    assert profiled("--output", "what.txt", script) == 0  # which advise would not take for a profile
    assert "advise" not in capfd.readouterr().out


def test_json_on_standard_output_is_alone_there(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text("import os; os.system('echo child')\n" + LOOP)
    assert profiled("--output", "-", "--name", "mine", script) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["model"] == "mine"
    assert "step 3" in err
    assert "child" in err
    assert not list(script.parent.glob("*.json"))


def test_a_script_may_go_elsewhere_and_to_its_end(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (script.parent / "other").mkdir()
    script.write_text(LOOP + "\nos.chdir('other')\nprint('the end')\n")
    assert profiled("--to-end", "--output", "out.json", script) == 0
    assert "the end" in capfd.readouterr().out
    os.chdir(script.parent)
    assert len(read(Path("out.json")).layers) == 2


def test_scripts_find_their_neighbours(script: Path) -> None:
    (script.parent / "neighbour_of_a_script.py").write_text("SIZE = 3\n")
    script.write_text("from neighbour_of_a_script import SIZE\n" + LOOP)
    try:
        assert profiled(script) == 0
    finally:
        sys.modules.pop("neighbour_of_a_script", None)


def test_fewer_iterations_are_taken_and_said(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert profiled("--iterations", "20", script) == 0
    assert "6 of 20 iterations" in capfd.readouterr().err
    assert "medians of 6 iterations" in read(script.with_name("loop.profile.json")).provenance


def test_an_interrupted_script_has_what_was_measured(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(LOOP + "    if step == 3: raise KeyboardInterrupt\n")
    assert profiled(script) == 130
    assert "interrupted after 2 of 3" in capfd.readouterr().err
    assert read(script.with_name("loop.profile.json")).layers


def test_a_good_end_by_exit_is_a_good_end(script: Path) -> None:
    script.write_text(LOOP + "sys.exit(0)\n")
    assert profiled("--to-end", script) == 0


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "said", "shown"),
    [
        ("    if step == 3: raise OSError('the disk is full')", r"failed (OSError) after 4 steps", "the disk is full"),
        ("    if step == 3: sys.exit('no more data')", "ended with status 1 after 4 steps", "no more data"),
        ("    if step == 3: sys.exit(7)", "ended with status 7 after 4 steps", ""),
        ("this is no Python", "failed (SyntaxError) after 0 steps", "this is no Python"),
    ],
)
def test_a_script_that_fails(end: str, said: str, shown: str, script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(f"{LOOP}{end}\n")
    assert profiled(script) == 1
    err = capfd.readouterr().err
    assert said in err.splitlines()[-1]
    assert shown in err
    assert "runpy" not in err  # the script's own lines alone
    assert not list(script.parent.glob("*.json"))


def test_an_option_of_ours_behind_a_script_that_refuses_it_is_told_of(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engineer wrote `ringprune profile train.py --name mine` and saw only their own script's usage."""
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert profiled(script, "--to-end") == 1
    assert "--to-end went to the script" in capfd.readouterr().err
    assert profiled(script, "--name=mine") == 1
    assert "--name=mine went to the script: options of ringprune profile stand before it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "no step of a torch optimizer"),
        (LOOP.replace("range(8)", "range(2)"), "all of its 2 steps were warm-up"),
        (LOOP.replace("optimizer.step()", "pass"), "no step of a torch optimizer"),
    ],
)
def test_nothing_to_measure(source: str, said: str, script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(source)
    assert profiled(script) == 1
    assert said in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "no such file"),
        (["--output", "none/x.json", "loop.py"], "a folder that exists"),
        (["--iterations", "0", "loop.py"], "at least 1"),
        (["--warmup", "0", "loop.py"], "at least 1"),
        ([], "SCRIPT"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        profiled(*words)
    assert ended.value.code == 2
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_a_name_that_cannot_be_written_is_said_before_the_script_runs(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.with_name("loop.profile.json").mkdir()
    assert profiled(script) == 2
    out, err = capfd.readouterr()
    assert "--output" in err
    assert "step" not in out


# -- with Horovod, and replayed ---------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize(
    "wrapped",
    ["hvd.DistributedOptimizer(sgd, named_parameters=named)", "rp.DistributedOptimizer(sgd, named, policy='dense')"],
    ids=["horovod", "ringprune"],
)
def test_wrapped_scripts_are_one_rank(wrapped: str, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    path = tmp_path / "wrapped.py"
    path.write_text(WRAPPED.format(wrapped=wrapped))
    output = str(tmp_path / "out.json")
    # As examples/ranks.py has it: without mpirun, Open MPI from a wheel does not know where it is installed.
    wheel = {"OPAL_PREFIX": sys.prefix} if (Path(sys.prefix) / "bin" / "orted").exists() else None
    words = f"profile --warmup 2 --iterations 3 --output {output} {path}".split()
    job = run_job("ringprune", *words, launcher="alone", timeout=90, environment=wheel)
    assert "step 3" in job.output
    assert "step 4" not in job.output  # stopped inside the fifth
    assert [layer.parameters for layer in read(Path(output)).layers] == [(48, 8), (16, 2)]


@pytest.mark.ranks
def test_a_recorded_profile_is_replayed(script: Path) -> None:
    pytest.importorskip("horovod")
    assert profiled(script) == 0
    path = script.with_name("loop.profile.json")
    output = script.with_name("rows.json")
    words = f"{path} --methods horovod dense --rounds 1 --iterations 2 --json {output}".split()
    run_job("mpi_scripts.replay", *words, timeout=120, environment={"OMP_NUM_THREADS": "1"})
    rows = json.loads(output.read_text())
    assert [(row["model"], row["entries"]) for row in rows] == [("loop", read(path).entries)] * 2
