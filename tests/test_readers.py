"""The readers of command lines: rates are what the emulated cluster reads, and written as they are read; files."""

import argparse
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringprune.readers import folder, picture, rate, target, written_rate
from ringprune.whole_file import write_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "mpi_scripts"))

from emulated_cluster import bits_per_second


@pytest.mark.parametrize("word", ["100mbit", "2.5gbit", "1GBIT", " 40gbit", "1500kbit", "2000000bit"])
def test_a_rate_is_what_the_cluster_makes_of_it(word: str) -> None:
    assert rate(word) == bits_per_second(word)


def test_without_limit_is_infinite() -> None:
    assert rate("unlimited") == math.inf
    assert written_rate(math.inf) == "unlimited"
    assert bits_per_second("unlimited") is None


@given(st.floats(1, 1e15))
def test_what_is_written_is_read_again_to_three_digits(bits: float) -> None:
    assert rate(written_rate(bits)) == pytest.approx(bits, rel=5.1e-3)


@pytest.mark.parametrize("word", ["", "fast", "10", "gbit", "-1gbit", "1 gbit", "0mbit", "1e9bit", "infbit", "10gb"])
def test_what_is_no_rate_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="100mbit"):
        rate(word)


@pytest.mark.parametrize("text", ["-", "plot", "plot.doc", "missing/plot.png"])
def test_no_file_for_a_picture(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError, match="a file "):
        picture(text)


def test_what_draws_is_missed_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was missed when all had been; then rows were lost, too."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(argparse.ArgumentTypeError, match="pip install matplotlib"):
        picture(str(tmp_path / "plot.png"))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    picture(str(tmp_path / "plot.png"))  # rank 0 draws


@pytest.mark.parametrize("length", [251, 252, 300])
def test_a_name_too_long_is_told_and_no_traceback(length: int, tmp_path: Path) -> None:
    name = str(tmp_path / ("x" * length))
    if length == 251:
        write_json([], target(name))
        return
    with pytest.raises(argparse.ArgumentTypeError, match="a file in a folder"):
        target(name)


@pytest.mark.parametrize("above", ["/proc", "/sys", "file"])
def test_what_takes_no_files_is_told_before_the_work(above: str, tmp_path: Path) -> None:
    """Root may write anywhere, says access(): it ended in a traceback once all had been measured."""
    (tmp_path / "file").touch()
    there = tmp_path / above / "rows.json"  # /proc and /sys stay what they are
    with pytest.raises(argparse.ArgumentTypeError, match="in a folder that exists"):
        target(str(there))
    with pytest.raises(argparse.ArgumentTypeError, match="in one that exists"):
        folder(str(there))


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    target(str(tmp_path / "rows.json"))
    folder(str(tmp_path / "figures"))
    assert not list(tmp_path.iterdir())


def test_only_the_rank_that_writes_needs_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks of a job may be on machines that do not have it."""
    missing = str(tmp_path / "missing" / "rows.json")
    for number, accepted in (("0", False), ("1", True)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", number)
        if accepted:
            assert target(missing) == missing
        else:
            with pytest.raises(argparse.ArgumentTypeError, match="in a folder that exists"):
                target(missing)
