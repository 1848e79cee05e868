"""A job of the demonstration: its progress, its log, and what is said when it fails."""

import sys
from pathlib import Path

import pytest
from jobs import Job, JobError, environment, horovodrun
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


def test_learning_rate_rises_and_falls() -> None:
    factor = warmup_then_cosine(steps=100, warmup=10)
    assert [factor(0), factor(9), factor(10)] == [0.1, 1.0, 1.0]
    assert factor(55) == pytest.approx(0.5)
    assert factor(99) < 0.001
