"""Accelerate, Lightning and transformers on two real ranks: they learn, few bytes travel, a saved run goes on."""

import re
from pathlib import Path

import pytest

from tests.mpi.launch import Job, Launcher, run_job

SCRIPTS = Path(__file__).resolve().parents[2] / "examples"
TIME_LIMIT = 240.0  # seconds for one job; twenty where nothing else runs, half of it imports
pytestmark = [pytest.mark.timeout(600), pytest.mark.ranks]


def needs(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed: make frameworks", exc_type=ImportError)


def run(script: str, *options: str | Path, launcher: Launcher = "torchrun", np: int = 2) -> Job:
    job = run_job(str(SCRIPTS / script), *map(str, options), np=np, launcher=launcher, timeout=TIME_LIMIT)
    assert "hasHooks" not in job.output, "torch warns of a group that it cannot look into"
    return job


def found(pattern: str, job: Job) -> tuple[float, ...]:
    match = re.search(pattern, job.output)
    assert match is not None, job.tails()
    return tuple(map(float, match.groups()))


def test_accelerate_with_the_wrapper_and_with_the_hook() -> None:
    needs("accelerate")
    for options, ratio in (((), 50), (("--hook",), 7)):
        right, fewer = found(r"([\d.]+)% right, ([\d.]+) times fewer", run("train_digits_accelerate.py", *options))
        assert right > 95, "of ten digits a tenth is right by chance"
        assert fewer > ratio


def test_lightning_with_the_wrapper_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    needs("lightning")
    options = ("--folder", tmp_path)
    job = run("train_digits_lightning.py", *options, "--epochs", "6", launcher="alone")
    right, fewer = found(r"([\d.]+)% right, ([\d.]+) times fewer", job)
    assert right > 95
    assert fewer > 40
    (saved,) = tmp_path.glob("*.ckpt")
    again = run("train_digits_lightning.py", *options, "--epochs", "7", "--resume", saved, launcher="alone")
    assert found(r"([\d.]+)% right", again)[0] > right - 2


def test_lightning_with_the_hook(tmp_path: Path) -> None:
    needs("lightning")
    options = ("--folder", tmp_path, "--hook", "--epochs", "8")
    right, fewer = found(
        r"([\d.]+)% right, ([\d.]+) times", run("train_digits_lightning.py", *options, launcher="alone")
    )
    assert right > 95
    assert fewer > 6


def test_transformers_with_the_wrapper_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    needs("transformers")
    options = ("--folder", tmp_path, "--steps", "60")
    pattern = r"validation loss ([\d.]+), ([\d.]+) times fewer"
    loss, fewer = found(pattern, run("train_charlm_transformers.py", *options))
    assert loss < 3.3, "ln 97 = 4.57 for what has learnt nothing"
    assert fewer > 12
    resumed, _ = found(pattern, run("train_charlm_transformers.py", *options, "--resume", tmp_path / "checkpoint-30"))
    assert abs(resumed - loss) < 0.1, "seeds of the two runs differ, and nothing else"


def test_transformers_with_the_hook(tmp_path: Path) -> None:
    needs("transformers")
    job = run("train_charlm_transformers.py", "--folder", tmp_path, "--steps", "60", "--hook")
    loss, fewer = found(r"validation loss ([\d.]+), ([\d.]+) times fewer", job)
    assert loss < 3.6
    assert fewer > 2
