"""A job of the demonstration: its progress, its log, and what is said when it fails."""

import sys
from pathlib import Path

import demo
import pytest
import ranks
import torch
from checkpoint import Checkpoint
from jobs import Job, JobError, environment, horovodrun
from journal import Journal
from options import options, total_steps, warmup_then_cosine


def job(tmp_path: Path, code: str, time_limit: float = 30) -> Job:
    return Job("digits iwp seed 1", [sys.executable, "-c", code], tmp_path / "logs" / "job.log", time_limit)


def test_progress_is_read_from_the_output(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    job(tmp_path, "for i in (5, 10): print(f'[1,0]<stdout>:digits: step {i}/10  loss 1')").run(
        lambda *point: seen.append(point)
    )
    assert seen == [(5, 10), (10, 10)]
    assert "\n[0] digits: step 10/10" in (tmp_path / "logs" / "job.log").read_text()


def test_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(JobError) as failure:
        job(tmp_path, "print('x\\n' * 100); raise SystemExit('the disk is full')").run(lambda *_: None)
    text = str(failure.value)
    assert "digits iwp seed 1 failed: exit status 1" in text
    assert "the disk is full" in text
    assert "ringprune doctor" in text
    assert len(text.splitlines()) < 40


@pytest.mark.timeout(60)
def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="took too long"):
        job(tmp_path, "import time; print('waiting', flush=True); time.sleep(100)", time_limit=1).run(lambda *_: None)


def test_launcher_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "with space"
    beside.mkdir()
    (beside / "horovodrun").write_text("#!/bin/sh\n")
    (beside / "horovodrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    command = horovodrun(2, Path("train.py"), "--seed", "1")
    assert command == [str(beside / "horovodrun"), "-np", "2", str(beside / "python"), "train.py", "--seed", "1"]
    assert environment()["PATH"].startswith(str(beside))
    (beside / "horovodrun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="horovodrun was not found"):
        horovodrun(2, Path("train.py"))


def test_length_of_a_run() -> None:
    parser = options("train_digits.py", "About.", epochs=30)
    args = parser.parse_args([])
    assert total_steps(args, steps_per_epoch=20) == 600
    assert (args.density_warmup, args.validate_every) == (60, 20)
    assert total_steps(parser.parse_args(["--steps", "7"]), steps_per_epoch=20) == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--steps 0", "--steps: '0': a whole number of at least 1"),
        ("--batch-size 0", "--batch-size: '0': a whole number of at least 1"),
        ("--density 2", "--density: '2': a number above 0 and at most 1"),
        ("--roots x", "--roots: 'x': a whole number of at least 1, or \"all\""),
        ("--clip 0", "--clip: '0': a number above 0"),
    ],
)
def test_wrong_values_are_told_with_what_is_right(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--steps 0 trained all epochs, --clip 0 nothing, the others ended in tracebacks."""
    with pytest.raises(SystemExit):
        options("train_digits.py", "About.", epochs=30).parse_args(words.split())
    assert says in capsys.readouterr().err


def test_to_stop_without_a_checkpoint_is_refused() -> None:
    """It stopped, and saved nothing."""
    args = options("train_digits.py", "About.", epochs=30).parse_args(["--stop-at", "5"])
    with pytest.raises(SystemExit, match="needs --checkpoint"):
        total_steps(args, steps_per_epoch=20)


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0; rank 1 has found nothing wrong."""
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(ranks, "gather", lambda own: [own, (4, None) if isinstance(own, tuple) else None])


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("name", ["", "file/log.json"])
def test_a_log_that_cannot_be_written_is_told_before_training(name: str, tmp_path: Path) -> None:
    """It was told when all had been trained, by a traceback, and the curves were lost."""
    (tmp_path / "file").touch()
    args = options("train_digits.py", "About.", epochs=30).parse_args(["--log-file", str(tmp_path / name)])
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit, match="--log-file"):
        Journal("digits", "accuracy", args, torch.optim.SGD(model.parameters()), model, steps=5)


@pytest.mark.usefixtures("first_of_two")
def test_a_damaged_file_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    """That rank ended with torch's error, the others with Horovod's of a job that was shut down."""
    (tmp_path / "run.pt.rank0").write_bytes(b"PK\3\4 cut off")
    args = options("train_digits.py", "About.", epochs=30).parse_args(["--checkpoint", str(tmp_path / "run.pt")])
    with pytest.raises(ValueError, match=r"run\.pt\.rank0 is no checkpoint of this script"):
        Checkpoint(args, 5).load()


def test_learning_rate_rises_and_falls() -> None:
    factor = warmup_then_cosine(steps=100, warmup=10)
    assert [factor(0), factor(9), factor(10)] == [0.1, 1.0, 1.0]
    assert factor(55) == pytest.approx(0.5)
    assert factor(99) < 0.001


@pytest.mark.parametrize("words", [("--np", "0"), ("--seeds", "0"), ("--steps", "-1"), ("--time-limit", "0")])
def test_the_demo_refuses_numbers_that_cannot_be(words: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--seeds 0`` ended in an IndexError, ``--steps -1`` in the trouble of every job."""
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    with pytest.raises(SystemExit, match="2"):
        demo.arguments()
