"""Files that are written all at once, and what is no file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from ringprune.__main__ import main
from ringprune.whole_file import write_whole


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_whole("new", path)
    path.chmod(0o600)
    write_whole("newer", str(path))
    assert path.read_text() == "newer" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """It became a file, and what it led to kept what it held."""
    (tmp_path / "store").mkdir()
    there, link = tmp_path / "store" / "rows.json", tmp_path / "link"
    link.symlink_to(there)
    for text in ("first", "second"):  # at first it leads nowhere
        write_whole(text, link)
        assert link.is_symlink() and there.read_text() == text


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    """It was replaced by a file; so was a device, where one may."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole("rows", pipe)
    reader.join(10)
    assert read == ["rows"] and pipe.is_fifo()


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Half of a file stayed beside it, and took the room that there was none of."""
    path = tmp_path / "rows.json"
    write_whole("old", path)
    with pytest.raises(UnicodeEncodeError):
        write_whole("new \ud800", path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("words", [["doctor"], ["advise", "--model", "resnet18", "--ranks", "4", "--rate", "1gbit"]])
def test_a_full_disk_is_told_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It was a traceback."""
    assert main([*words, "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") > 3, "what is for people was shown"
    assert err.startswith(f"ringprune {words[0]}: [Errno 28]") and err.count("\n") == 1
