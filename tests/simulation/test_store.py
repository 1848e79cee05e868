"""The store: what is in it stays, what was cut short is not, and nobody makes a run twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringprune import __main__
from ringprune.errors import ConfigurationError
from ringprune.simulation.spec import parse
from ringprune.simulation.store import Key, Store

DENSE = parse("dense").resolved
KEY = Key("tiny", "1-0", DENSE, 4, 0.1, 0, 24)

HOLD = """
import sys
from pathlib import Path
from ringprune.simulation.store import Key, Store
with Store(Path(sys.argv[1])).claim(Key("tiny", "1-0", sys.argv[2], 4, 0.1, 0, 24)) as ours:
    print(ours, flush=True)
    sys.stdin.read()
"""


def test_runs_are_kept_with_their_settings(tmp_path: Path) -> None:
    Store(tmp_path / "s").add(KEY, {"value": 1.5})
    ((digest, record),) = Store(tmp_path / "s").records().items()
    assert (digest, record["learning_rate"], record["value"]) == (KEY.digest, 0.1, 1.5)


def test_a_line_cut_short_is_not_read_and_harms_no_other(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.add(KEY, {"value": 1.5})
    whole = store.path.read_text()
    store.path.write_text(whole + whole[: len(whole) // 2])
    assert list(store.records()) == [KEY.digest]
    other = Key("tiny", "1-0", DENSE, 4, 0.2, 0, 24)
    store.add(other, {"value": 1.0})
    assert list(store.records()) == [KEY.digest, other.digest]


@pytest.mark.parametrize("damaged", [b"\xff\xfe\x00", b"12", b"null", b"NaN", b"[]", b"{}", b'{"task": "tiny"}'])
def test_a_damaged_line_harms_no_other(damaged: bytes, tmp_path: Path) -> None:
    """One such line, and neither the table nor a new run could be made."""
    store = Store(tmp_path / "s")
    store.add(KEY, {"value": 1.5})
    store.path.write_bytes(damaged + b"\n" + store.path.read_bytes() + damaged + b"\n")
    assert list(store.records()) == [KEY.digest]


@pytest.mark.parametrize("text", ['{"ringprune": 1, "policy": "iwp"}\n{"step": 1}\n', '{"a": 1}', "\nwords\n"])
@pytest.mark.parametrize("command", ["accuracy --quick", "run --task digits --policy dense --rate 1 --jobs 0"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    command: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs were appended to whatever file was named, such as a StatsLog."""
    (tmp_path / "s").write_text(text)
    assert __main__.main(["simulate", *command.split(), "--store", str(tmp_path / "s")]) == 2
    assert f"--store {tmp_path}/s holds no finished run: name another file" in capsys.readouterr().err
    assert (tmp_path / "s").read_text() == text


@pytest.mark.parametrize("text", ["", "\n", '{"task": "ti', '{"task": "ti\n'])
def test_a_first_line_that_was_cut_short_leaves_a_store(text: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(text)
    store = Store(tmp_path / "s")
    assert store.records() == {}
    store.add(KEY, {"value": 1.5})
    assert list(store.records()) == [KEY.digest]


def test_a_store_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    """It read as "another process is at it", and was asked again every two seconds for ever."""
    with (
        pytest.raises(ConfigurationError, match=r"missing/s.lock: No such file or directory"),
        Store(tmp_path / "missing" / "s").claim(KEY),
    ):
        pass


def test_every_setting_makes_another_run() -> None:
    other = [Key("t", "1-0", "dense", 4, 0.1, 0, 24), Key("tiny", "2-0", "dense", 4, 0.1, 0, 24)]
    other += [Key("tiny", "1-0", "iwp", 4, 0.1, 0, 24), Key("tiny", "1-0", "dense", 8, 0.1, 0, 24)]
    other += [Key("tiny", "1-0", DENSE, 4, 0.2, 0, 24), Key("tiny", "1-0", DENSE, 4, 0.1, 1, 24)]
    other += [Key("tiny", "1-0", "dense", 4, 0.1, 0, 25)]
    assert len({key.digest for key in [KEY, *other]}) == 8


def test_a_finished_run_is_not_claimed(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    with store.claim(KEY) as ours:
        assert ours
    store.add(KEY, {"value": 1.5})
    with store.claim(KEY) as ours:
        assert not ours


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_two_processes_do_not_make_the_same_run_and_a_killed_one_leaves_it(tmp_path: Path, end: int) -> None:
    store = Store(tmp_path / "s")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store.path), DENSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with store.claim(KEY) as ours:
            assert not ours
        with store.claim(Key("tiny", "1-0", DENSE, 4, 0.1, 1, 24)) as ours:
            assert ours, "another run is free"
        os.kill(other.pid, end)
        other.wait(30)
    with store.claim(KEY) as ours:
        assert ours


def test_a_run_stays_when_its_policy_gets_a_new_argument(tmp_path: Path) -> None:
    store, now = Store(tmp_path / "s"), parse("iwp:roots=all").resolved
    then = now.replace(",lookahead=false", "")
    assert then != now
    store.add(Key("tiny", "1-0", then, 4, 0.1, 0, 24), {"value": 1.5})
    assert list(store.records()) == [Key("tiny", "1-0", now, 4, 0.1, 0, 24).digest]
