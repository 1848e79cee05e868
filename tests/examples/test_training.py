"""The training scripts and the demonstration as real jobs, on two ranks and on one, stopped and continued."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import environment
from rows import row_of

from tests.examples.test_data import write_cifar, write_images
from tests.examples.test_rows import KEYS
from tests.mpi.launch import run_job

HERE = Path(__file__).resolve().parent
SCRIPTS = Path(__file__).resolve().parents[2] / "examples"
TIME_LIMIT = 120.0  # seconds for one job; a few where nothing else runs
pytestmark = [pytest.mark.timeout(600), pytest.mark.ranks]


def two_ranks(script: str, *options: str | Path, check: bool = True) -> str:
    """Run a training script under mpirun and return what it said."""
    return run_job(str(SCRIPTS / script), *map(str, options), np=2, timeout=TIME_LIMIT, check=check).output


def alone(script: str, *options: str | Path, status: int = 0) -> str:
    """Run a script without a launcher and return what it said; it has to end with ``status``."""
    command = [sys.executable, *map(str, (SCRIPTS / script, *options))]
    env = environment() | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3 * TIME_LIMIT)
    said = done.stdout + done.stderr
    assert done.returncode == status, said[-4000:]
    return said


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_digits_with_plain_horovod_and_with_dense(tmp_path: Path) -> None:
    records = {}
    for policy in ("horovod-fp32", "dense"):
        log = tmp_path / f"{policy}.json"
        said = two_ranks("train_digits.py", "--policy", policy, "--steps", "6", "--log-file", log)
        assert "digits: step 6/6" in said
        records[policy] = read(log)
    plain, dense = records["horovod-fp32"], records["dense"]
    assert set(row_of(plain)) >= KEYS
    assert plain["curve"]["loss"] == dense["curve"]["loss"], "dense is plain Horovod to the bit"
    assert plain["stats"]["bytes_sent"] == plain["curve"]["bytes"][-1] == 6 * 4 * 283_786
    assert dense["stats"]["wire_ratio"] == pytest.approx(1, rel=0.01)
    assert plain["steps_per_second"] > 0


def test_what_is_faster_is_chosen(tmp_path: Path) -> None:
    """It times and measures for some 30 steps, then it says what it found."""
    log = tmp_path / "auto.json"
    said = two_ranks("train_digits.py", "--policy", "auto", "--steps", "60", "--clip", "5", "--log-file", log)
    assert re.search(r"auto: link [\d.]+ \wbit/s x 2, 283,786 entries: ", said)
    chosen = read(log)["stats"]["auto"]
    assert chosen["chosen"].split()[0].lower() in ("dense", "iwp")  # such as "IWP 1 %"
    assert not chosen["deciding"]


def test_one_file_stopped_and_continued(tmp_path: Path) -> None:
    """The script to copy from: two epochs are one, an end at either of the worst moments, and one more."""
    said = two_ranks(str(HERE / "one_file_job.py"), tmp_path / "whole", "2")
    assert re.search(r"epoch  2: [\d.]+ % of 400 held out\n.*bytes: 1/\d\d of what dense fp32 sends", said)
    whole = torch.load(tmp_path / "whole" / "model.pt", weights_only=True)
    for moment, left in (("die", ["rank0.new", "rank1.new"]), ("tear", ["rank1.new"])):
        two_ranks(str(HERE / "one_file_job.py"), tmp_path / moment, "2", moment, check=False)
        found = sorted(file.name for file in (tmp_path / moment).glob("*.new"))
        assert found == left, "it died between writing and replacing"
        two_ranks(str(HERE / "one_file_job.py"), tmp_path / moment, "2")
        assert_equal(whole, torch.load(tmp_path / moment / "model.pt", weights_only=True))


def test_stop_and_continue_equals_not_stopping(tmp_path: Path) -> None:
    options = ("--policy", "iwp", "--steps", "8", "--density-warmup", "3", "--validate-every", "4")
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    two_ranks("train_digits.py", *options, "--checkpoint", whole, "--log-file", tmp_path / "whole.json")
    two_ranks("train_digits.py", *options, "--checkpoint", parts, "--stop-at", "5")
    two_ranks("train_digits.py", *options, "--checkpoint", parts, "--log-file", tmp_path / "parts.json")
    for rank in range(2):
        one, two = (torch.load(f"{path}.rank{rank}", weights_only=True) for path in (whole, parts))
        assert one["step"] == two["step"] == 8
        for part in ("model", "optimizer", "schedule"):
            assert_equal(one[part], two[part])
    unbroken, continued = (read(tmp_path / f"{name}.json") for name in ("whole", "parts"))
    assert continued["curve"]["loss"] == unbroken["curve"]["loss"]
    assert continued["value"] == unbroken["value"]
    last = unbroken["curve"]["bytes"][-1]
    assert last < continued["curve"]["bytes"][-1] < 1.01 * last, "starting again costs a hand-shake, and no more"
    said = two_ranks("train_digits.py", *options, "--checkpoint", parts, "--density", "0.5", check=False)
    assert "was written with {'density': 0.01}, this run has {'density': 0.5}" in said


def test_torchrun_gives_the_same_model_as_mpirun(tmp_path: Path) -> None:
    """On two ranks a sum has one order, so that every library gives the same bytes."""
    options = ("--policy", "iwp", "--steps", "8", "--density-warmup", "3", "--validate-every", "4")
    two_ranks("train_digits.py", *options, "--checkpoint", tmp_path / "mpirun.pt")
    script, checkpoint = str(SCRIPTS / "train_digits.py"), str(tmp_path / "torchrun.pt")
    job = run_job(script, *options, "--checkpoint", checkpoint, launcher="torchrun", timeout=TIME_LIMIT)
    assert "digits, iwp on 2 ranks: validation accuracy" in job.output
    for rank in range(2):
        one, two = (
            torch.load(tmp_path / f"{name}.pt.rank{rank}", weights_only=True) for name in ("mpirun", "torchrun")
        )
        for part in ("model", "optimizer", "schedule"):
            assert_equal(one[part], two[part])


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    said = two_ranks("train_digits.py", "--steps", "2", "--log-file", tmp_path, check=False)
    assert f"--log-file {tmp_path} is no file that can be written" in said
    assert "step 1/2" not in said


def test_torchrun_has_no_horovod() -> None:
    script = str(SCRIPTS / "train_digits.py")
    job = run_job(script, "--policy", "horovod-fp32", launcher="torchrun", timeout=TIME_LIMIT, check=False)
    assert "--policy horovod-fp32 needs Horovod's ranks: start it with horovodrun or mpirun" in job.output


def assert_equal(one: Any, two: Any) -> None:
    """The same numbers, all the way down."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_equal(first, second)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@pytest.mark.parametrize("policy", ["iwp", "recommended"])
def test_charlm_on_one_rank_without_a_launcher(tmp_path: Path, policy: str) -> None:
    for number in range(2):
        (tmp_path / f"{number}.py").write_text("for i in range(10):\n    print(i)\n" * 40)
    said = alone("train_charlm.py", "--steps", "3", "--data", tmp_path, "--policy", policy)
    assert "validation loss" in said


def test_cifar10(tmp_path: Path) -> None:
    options = ("--data", write_cifar(tmp_path), "--steps", "3", "--batch-size", "4", "--depth", "8")
    assert "test accuracy" in two_ranks("train_cifar10.py", *options)
    (tmp_path / "test_batch.bin").write_bytes(b"damaged")
    assert "test_batch.bin: 7 bytes, not a multiple of 3073" in two_ranks("train_cifar10.py", *options, check=False)


def test_imagenet(tmp_path: Path) -> None:
    small = ("--model", "resnet18", "--image-size", "32", "--batch-size", "2", "--epochs", "2")
    assert "validation accuracy" in two_ranks("train_imagenet.py", "--data", write_images(tmp_path), *small)


def test_demo_writes_rows_and_figures(tmp_path: Path) -> None:
    folders = ("--out", tmp_path / "a b" / "demo", "--logs", tmp_path / "a b" / "logs")
    said = alone("demo.py", "--tasks", "digits", "--steps", "6", *folders)
    rows = json.loads((tmp_path / "a b" / "demo" / "results.json").read_text())
    assert [row["method"] for row in rows] == ["horovod-fp32", "horovod-fp16", "ringprune:iwp", "ringprune:recommended"]
    assert all(set(row) >= KEYS for row in rows)
    assert "ringprune:iwp" in said and "ringprune:recommended" in said
    assert (tmp_path / "a b" / "demo" / "loss_vs_bytes.png").exists()


def test_demo_that_fails_leaves_no_results(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "results.json").write_text("of an earlier run")
    folders = ("--out", tmp_path / "demo", "--logs", tmp_path / "logs")
    said = alone("demo.py", "--time-limit", "0.5", *folders, status=1)
    assert "digits horovod-fp32 seed 1 failed: took too long" in said
    assert "What to try" in said
    assert list((tmp_path / "demo").iterdir()) == []
