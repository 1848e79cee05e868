"""Accelerate, Lightning and transformers on two real ranks: they learn, few bytes travel, a saved run goes on."""

import re
from pathlib import Path

import pytest
import torch

from tests.mpi.launch import Job, Launcher, run_job

SCRIPTS = Path(__file__).resolve().parents[2] / "examples"
TIME_LIMIT = 240.0  # seconds for one job; twenty where nothing else runs, half of it imports
pytestmark = [pytest.mark.timeout(600), pytest.mark.ranks]


def needs(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed: make frameworks")  # a broken one fails


def run(script: str, *options: str | Path, launcher: Launcher = "torchrun", np: int = 2) -> Job:
    job = run_job(str(SCRIPTS / script), *map(str, options), np=np, launcher=launcher, timeout=TIME_LIMIT)
    assert "hasHooks" not in job.output, "torch warns of a group that it cannot look into"
    return job


def found(pattern: str, job: Job) -> tuple[float, ...]:
    match = re.search(pattern, job.output)
    assert match is not None, job.tails()
    return tuple(map(float, match.groups()))


WORDS = r"([\d]+) steps, .*?([\d.]+)%? ?(?:right)?, ([\d.]+) times fewer"


def test_accelerate_with_the_wrapper() -> None:
    needs("accelerate")
    steps, right, fewer = found(WORDS, run("train_digits_accelerate.py"))
    assert steps == 220
    assert right > 95, "of ten digits a tenth is right by chance"
    assert fewer > 50


def test_accelerate_accumulates_gradients() -> None:
    """Without accelerator.prepare(optimizer) every backward pass was a step, of a part of its gradient."""
    needs("accelerate")
    steps, right, _ = found(WORDS, run("train_digits_accelerate.py", "--accumulate", "2"))
    assert steps == 110
    assert right > 93


def test_accelerate_with_the_hook() -> None:
    needs("accelerate")
    _, right, fewer = found(WORDS, run("train_digits_accelerate.py", "--hook"))
    assert right > 95
    assert fewer > 7


def test_lightning_with_the_wrapper_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Of any epoch, whoever saved it: there has been a flush before it."""
    needs("lightning")
    options = ("--folder", tmp_path)
    job = run("train_digits_lightning.py", *options, "--epochs", "5", launcher="alone")
    steps, right, fewer = found(WORDS, job)
    assert steps == 110
    assert right > 93
    assert fewer > 15
    (saved,) = tmp_path.glob("*.ckpt")
    content = torch.load(saved, weights_only=True)
    assert content["optimizer_states"][0]["ringprune"]["flushed"]
    again = run("train_digits_lightning.py", *options, "--epochs", "7", "--resume", saved, launcher="alone")
    steps, later, _ = found(WORDS, again)
    assert steps == 154 - content["global_step"], "those that were made before are not made again"
    assert later > right - 2


def test_lightning_with_the_hook(tmp_path: Path) -> None:
    needs("lightning")
    job = run("train_digits_lightning.py", "--folder", tmp_path, "--hook", "--epochs", "8", launcher="alone")
    _, right, fewer = found(WORDS, job)
    assert right > 95
    assert fewer > 6


def test_transformers_with_the_wrapper_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Evaluated and saved in the middle of an interval, with the best model loaded at the end."""
    needs("transformers")
    options = ("--folder", tmp_path, "--steps", "60")
    steps, loss, fewer = found(WORDS, run("train_charlm_transformers.py", *options))
    assert steps == 60
    assert loss < 3.3, "ln 97 = 4.57 for what has learnt nothing"
    assert fewer > 8
    saved = tmp_path / "checkpoint-30"
    assert torch.load(saved / "optimizer.pt", weights_only=True)["ringprune"]["flushed"]
    steps, resumed, _ = found(WORDS, run("train_charlm_transformers.py", *options, "--resume", saved))
    assert steps == 30, "those that were made before are not made again"
    assert abs(resumed - loss) < 0.1


def test_transformers_with_the_hook(tmp_path: Path) -> None:
    needs("transformers")
    job = run("train_charlm_transformers.py", "--folder", tmp_path, "--steps", "60", "--hook")
    _, loss, fewer = found(WORDS, job)
    assert loss < 3.6
    assert fewer > 2
