"""The log of a run's statistics, and ``ringprune report`` that reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import ringprune as rp
from ringprune.__main__ import main
from ringprune.report.rows import sent
from ringprune.stats_log import read
from tests.training import batches, loss_of, make_model, wrap

IWP = rp.IWP(0.05)
STEADY = ("steady_bytes_sent", "steady_dense_equivalent_bytes")
LINE = '{"calls": 4, "elapsed_seconds": 1.5, "values": {"loss": 0.25}, "stats": {"bytes_sent": 3.5}}\n'


class Writer:
    """Like TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def logged(
    path: Path, policy: Any = IWP, steps: int = 7, every: int = 3, writer: Any = None, **more: Any
) -> dict[str, Any]:
    """Train on two ranks, of which rank 0 writes; its statistics at the end."""

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, policy)
        log = rp.StatsLog(path, optimizer, every=every, writer=writer, **more) if comm.rank == 0 else None
        for batch in batches(comm.rank, steps):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if log is not None:
                log.step(loss=loss)
        if log is not None:
            log.close()
            log.close()
        return optimizer.stats()

    return rp.simulate(2, rank)[0]


def report(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["report", *words, "--json", "-"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_lines_come_at_intervals_and_the_last_at_the_end(tmp_path: Path) -> None:
    writer = Writer()
    stats = logged(tmp_path / "run.jsonl", writer=writer)
    lines = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["calls"] for line in lines] == [0, 3, 6, 7]
    assert lines[-1]["stats"] == rp.scalars(stats)
    assert "loss" not in lines[0]["values"] and lines[-1]["values"]["loss"] > 0
    assert [at for tag, _, at in writer.scalars if tag == "ringprune/bytes_sent"] == [0, 3, 6, 7]
    assert ("ringprune/loss", lines[-1]["values"]["loss"], 7) in writer.scalars


def test_scalars_are_flat_numbers() -> None:
    stats = {"steps": 2, "auto": {"said": "dense", "times": {"x": 0.5}}, "on": True, "seconds": {"select": 1.0}}
    assert rp.scalars(stats) == {"steps": 2.0, "auto/times/x": 0.5, "seconds/select": 1.0}


def test_a_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = logged(tmp_path / "run.jsonl")
    (row,) = report(capsys, str(tmp_path / "run.jsonl"))
    assert row["steps"] == 7 and row["skipped_steps"] == 0
    assert sum(row["parts_per_step"].values()) == pytest.approx(row["bytes_per_step"])
    assert row["wire_ratio"] == pytest.approx(stats["wire_ratio"])
    # What construction has sent is in the first line already.
    assert 0 < row["bytes_per_step"] <= stats["bytes_sent"] / 7


def test_nothing_sent_has_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one rank it was that of what would have been sent, in a log of one part alone."""

    def rank(comm: rp.comm.Communicator) -> None:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        with rp.StatsLog(tmp_path / "run.jsonl", optimizer, every=1) as log:
            for batch in batches(0, 3):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                log.step()

    rp.simulate(1, rank)
    (row,) = report(capsys, str(tmp_path / "run.jsonl"))
    assert row["bytes_per_step"] == 0 and row["wire_ratio"] is row["steady_wire_ratio"] is None


def test_a_part_that_sends_nothing_leaves_the_ratio_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a resumed run that ends at once."""
    logged(tmp_path / "run.jsonl")
    (before,) = report(capsys, str(tmp_path / "run.jsonl"))
    logged(tmp_path / "run.jsonl", steps=0, append=True)
    (row,) = report(capsys, str(tmp_path / "run.jsonl"))
    assert before["wire_ratio"] > 1
    for name in ("wire_ratio", "steady_wire_ratio"):
        assert row[name] == pytest.approx(before[name])


def test_runs_are_compared_in_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, policy in (("dense", rp.Dense()), ("iwp", IWP)):
        files.append(str(tmp_path / f"{name}.jsonl"))
        logged(Path(files[-1]), policy)
    picture = tmp_path / "runs.png"
    assert main(["report", *files, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "dense.jsonl" in shown and "iwp.jsonl" in shown and "loss" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    dense, iwp = report(capsys, *files)
    assert iwp["bytes_per_step"] < dense["bytes_per_step"]


def test_names_are_drawn_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r"""``$\frac$`` was no formula and raised, ``$`` and what followed was gone, ``_`` left a run out of the legend."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    names = ["_a.jsonl", r"$\frac$.jsonl", "a$b$.jsonl"]
    for name in names:
        Path(name).write_text(LINE.replace(": 4", ": 0").replace("loss", "$loss$") + LINE.replace("loss", "$loss$"))
    drawn: list[str] = []

    def close(figure: Any) -> None:
        for axes in figure.axes:
            legend = [text.get_text().strip() for text in axes.get_legend().get_texts()]
            assert [name.replace(r"\$", "$") for name in legend] == names
        drawn.append(figure.axes[1].get_ylabel().replace(r"\$", "$"))

    monkeypatch.setattr(pyplot, "close", close)
    assert main(["report", *names, "--plot", "runs.png"]) == 0
    assert drawn == ["$loss$"]


def test_a_run_that_was_killed_has_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    logged(path)
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert report(capsys, str(path))[0]["steps"] == 6
    path.write_text(whole.splitlines()[0] + "\n")
    (row,) = report(capsys, str(path))
    assert row["steps"] == 0 and row["bytes_per_step"] is None
    assert main(["report", str(path), "--plot", str(tmp_path / "one.png")]) == 0


def test_a_resumed_run_goes_on_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, writer = tmp_path / "run.jsonl", Writer()
    first = logged(path, append=True)  # nothing is there to go on with
    path.write_text(path.read_text() + '{"calls": 9, "ela')  # killed while it wrote
    second = logged(path, steps=5, append=True, writer=writer)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["calls"] for line in lines] == [0, 3, 6, 7, 7, 9, 12]
    assert [line["stats"]["steps"] for line in lines] == [0, 3, 6, 7, 0, 2, 5]
    assert [line["elapsed_seconds"] for line in lines] == sorted(line["elapsed_seconds"] for line in lines)
    assert [at for tag, _, at in writer.scalars if tag == "ringprune/bytes_sent"] == [7, 9, 12]

    (row,) = report(capsys, str(path))
    ends = first, second
    begins = [lines[at]["stats"] for at in (0, 4)]
    sent = [end["bytes_sent"] - begin["bytes_sent"] for end, begin in zip(ends, begins, strict=True)]
    assert row["steps"] == 12 and row["bytes_per_step"] == pytest.approx(sum(sent) / 12)
    dense, total = (sum(end[name] for end in ends) for name in ("dense_equivalent_bytes", "bytes_sent"))
    assert row["wire_ratio"] == pytest.approx(dense / total)
    assert row["steady_wire_ratio"] == pytest.approx(dense / total), "there is no warm-up; it was that of the last part"
    assert min(end["wire_ratio"] for end in ends) <= row["wire_ratio"] <= max(end["wire_ratio"] for end in ends)
    assert main(["report", str(path), "--plot", str(tmp_path / "run.png")]) == 0


def test_warm_up_is_in_no_steady_ratio_of_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that had ended within warm-up came in with all that it had sent."""
    path, warming = tmp_path / "run.jsonl", rp.IWP(0.05, warmup=rp.Warmup(steps=4, start=1.0))
    logged(path, warming, steps=3)
    (row,) = report(capsys, str(path))
    assert row["steady_wire_ratio"] == row["wire_ratio"], "nothing is steady yet"
    second = logged(path, rp.IWP(0.05), steps=5, append=True)
    (row,) = report(capsys, str(path))
    assert row["wire_ratio"] < row["steady_wire_ratio"] == pytest.approx(second["wire_ratio"])
    older = [json.loads(text) for text in path.read_text().splitlines()]
    for line in older:
        line["stats"] = {name: n for name, n in line["stats"].items() if name not in STEADY}
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    (row,) = report(capsys, str(path))
    assert row["steady_wire_ratio"] == pytest.approx(second["steady_wire_ratio"]), "as logs of before tell it"


def test_what_a_last_flush_sends_is_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a step since the last line there was no other: the report told a ratio of 39 where it was 22."""
    path = tmp_path / "run.jsonl"

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        log = rp.StatsLog(path, optimizer, every=2) if comm.rank == 0 else None
        for batch in batches(comm.rank, 4):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if log is not None:
                log.step()
        optimizer.flush()
        if log is not None:
            log.close()
        return optimizer.stats()

    stats = rp.simulate(2, rank)[0]
    (row,) = report(capsys, str(path))
    assert row["wire_ratio"] == pytest.approx(stats["wire_ratio"])
    assert row["steps"] == 4


def test_a_log_for_each_epoch_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer was the same one, and what it had sent was added again."""
    path = tmp_path / "run.jsonl"

    def rank(comm: rp.comm.Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = wrap(model, comm, IWP)
        for _epoch in range(3):
            with rp.StatsLog(path if comm.rank == 0 else tmp_path / "other", optimizer, append=True) as log:
                for batch in batches(comm.rank, 2):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
                    log.step()
        return optimizer.stats()

    stats = rp.simulate(2, rank)[0]
    lines = read(path)
    assert sent(lines)[-1] == stats["bytes_sent"]
    (row,) = report(capsys, str(path))
    assert row["steps"] == 6 and row["wire_ratio"] == pytest.approx(stats["wire_ratio"])


@pytest.mark.parametrize(
    ("left", "calls"),
    [(LINE[:-1], [4, 4, 5]), (LINE[:9], [0, 1]), (LINE + LINE[:30], [4, 4, 5]), (LINE * 2, [4, 4, 4, 5])],
)
def test_what_a_killed_run_left_is_gone_on_with(left: str, calls: list[int], tmp_path: Path) -> None:
    """A whole line without its end was removed, and so was a file's only one, which was then said to be missing."""
    path = tmp_path / "run.jsonl"
    path.write_text(left)
    logged(path, steps=1, append=True)
    assert [line["calls"] for line in read(path)] == calls


def test_a_file_of_others_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine\nno line end")
    with pytest.raises(rp.ConfigurationError, match="line 1: not JSON"):
        logged(path, append=True)
    assert path.read_text() == "mine\nno line end"


def test_what_is_not_finite_is_null_and_what_is_no_number_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"

    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        with pytest.raises(KeyError, match="mine"), rp.StatsLog(path, optimizer) as log:
            for wrong in (torch.ones(3), "1.0", None, np.ones(3), torch.ones(1, dtype=torch.complex64), 10**400):
                with pytest.raises(rp.ArgumentTypeError, match="loss"):
                    log.step(loss=cast("Any", wrong))
            log.step(loss=torch.full((1, 1), torch.nan), rate=0.5)
            raise KeyError("mine")

    rp.simulate(1, rank)
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    (row,) = report(capsys, str(path))
    assert row["steps"] == 1 and row["values"] == {"loss": None, "rate": 0.5}
    assert main(["report", str(path), "--plot", str(tmp_path / "run.png")]) == 0
    assert "loss not finite, rate 0.5" in capsys.readouterr().out


def test_blank_lines_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(LINE.replace(": 4", ": 0") + "\n" + LINE + "\r\n\n")
    (row,) = report(capsys, str(path))
    assert row["steps"] == 4 and row["values"] == {"loss": 0.25}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "no line of ringprune.StatsLog in it"),
        ("\n\n", "no line of ringprune.StatsLog"),
        ("[1]\n", "line 1: not a line of ringprune.StatsLog"),
        ('{"calls": 1}\n', "line 1: not a line of ringprune.StatsLog"),
        ("not json\n{}\n", "so no log of ringprune.StatsLog, which writes in each line a JSON object of calls, "),
        (b"\x93NUMPY\xbe", "no text, so no log of ringprune.StatsLog, which writes"),
        ("\x00\n", "line 1: not JSON"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
        (LINE + LINE.replace("3.5", '"x"'), "line 2: not a line of ringprune.StatsLog"),
        (LINE + LINE.replace("3.5", "null"), "line 2: not a line of ringprune.StatsLog"),
        (LINE.replace("1.5", "true"), "line 1: not a line of ringprune.StatsLog"),
        (LINE.replace("3.5", "1" + "0" * 400), "line 1: not a line of ringprune.StatsLog"),
        (LINE.replace(": 4", ": 20") + LINE, "line 2: call 4 after call 20, so that it holds several runs"),
    ],
)
def test_a_file_that_is_none_is_named(
    text: str | bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["report", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ringprune report: ") and str(path) in told and said in told


def test_wrong_arguments_of_a_log_are_named(tmp_path: Path) -> None:
    def rank(comm: rp.comm.Communicator) -> None:
        optimizer, wrong = wrap(make_model(), comm, IWP), cast("Any", make_model())
        with pytest.raises(rp.ConfigurationError, match="every=0"):
            rp.StatsLog(tmp_path / "a", optimizer, every=0)
        with pytest.raises(rp.ConfigurationError, match="No such file or directory"):
            rp.StatsLog(tmp_path / "missing" / "a", optimizer)
        with pytest.raises(rp.ArgumentTypeError, match="something with stats"):
            rp.StatsLog(tmp_path / "a", wrong)
        with pytest.raises(rp.ArgumentTypeError, match="writer is a str: something with add_scalar"):
            rp.StatsLog(tmp_path / "a", optimizer, writer=cast("Any", "runs"))
        with rp.StatsLog(tmp_path / "a", optimizer) as log:
            log.step()
        assert len((tmp_path / "a").read_text().splitlines()) == 2

    rp.simulate(1, rank)


def test_a_step_after_close_is_told_at_once(tmp_path: Path) -> None:
    """The first were taken in silence, and the one of a line raised "I/O operation on closed file"."""

    def rank(comm: rp.comm.Communicator) -> None:
        with rp.StatsLog(tmp_path / "run.jsonl", wrap(make_model(), comm, IWP), every=2) as log:
            log.step(loss=1.0)
        for _ in range(2):
            with pytest.raises(rp.UsageError, match=r"step\(\) of a log that is closed, '.*run.jsonl'.*append=True"):
                log.step(loss=2.0)
        log.close()

    rp.simulate(1, rank)
    assert [line["calls"] for line in read(tmp_path / "run.jsonl")] == [0, 1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    """It was "No space left on device", without a name, and once more from close()."""

    def rank(comm: rp.comm.Communicator) -> None:
        optimizer = wrap(make_model(), comm, IWP)
        with pytest.raises(rp.ConfigurationError, match="path='/dev/full': No space left on device"):
            rp.StatsLog("/dev/full", optimizer)
        log = rp.StatsLog(tmp_path / "run.jsonl", optimizer, every=1)
        log.step()
        log._file.close()
        log._file = open("/dev/full", "w")  # noqa: SIM115 - as if the disk were full from here on
        with pytest.raises(rp.ConfigurationError, match="No space left on device; the line of call 2 "), log:
            log.step()
        assert [line["calls"] for line in read(tmp_path / "run.jsonl")] == [0, 1]

    rp.simulate(1, rank)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ringprune {rp.__version__}\n"


def test_letters_that_a_terminal_has_not_are_escaped(tmp_path: Path) -> None:
    """The table ended in a traceback."""
    path = tmp_path / "run.jsonl"
    path.write_text(LINE.replace("loss", "l\\u00f6\\u2603"))
    command, environment = (
        [sys.executable, "-m", "ringprune", "report", str(path)],
        os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "l\\xf6\\u2603 0.25" in done.stdout, done.stderr
