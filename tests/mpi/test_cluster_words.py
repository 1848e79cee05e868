"""The command line of the emulated cluster where folders, numbers or who reads are not what they should be."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_scripts.emulated_cluster import Cluster, ClusterError
from mpi_scripts.emulated_cluster.state import locked
from tests.mpi.test_cluster import COMMAND, command, needs_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.temporary(2, "1gbit") as made:
        yield made


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_takes_no_files(place: str, tmp_path: Path) -> None:
    """A checkout that can only be read is such a place, too: one line tells how to go on."""
    (tmp_path / "file").touch()
    done = command(tmp_path / place, "status")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "no cluster is up in" in done.stderr
    says = r"takes no files .*: name another folder in RINGPRUNE_CLUSTER"
    with pytest.raises(ClusterError, match=says), locked(tmp_path / place):
        pytest.fail("it is locked")


@pytest.mark.parametrize("text", ["null", '"x"', "[]"])
def test_a_file_that_is_no_state(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    done = command(tmp_path, "status")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "is not the state of a cluster" in done.stderr


def test_a_state_that_cannot_be_read(tmp_path: Path) -> None:
    """It was said to be none, and to delete it, though a cluster may be up."""
    (tmp_path / "state.json").mkdir()
    done = command(tmp_path, "status")
    assert (done.returncode, done.stderr) == (1, f"cluster: {tmp_path}/state.json cannot be read (Is a directory)\n")


@pytest.mark.parametrize(
    "words",
    ["unplug h0 --seconds -1", "unplug h0 --seconds 1e10", "mpirun --timeout nan 2 true", "launch --timeout x 2 true"],
)
def test_seconds_that_are_none(words: str, tmp_path: Path) -> None:
    """A cable was pulled, then a traceback; a time limit of nan was none."""
    done = command(tmp_path, *words.split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(": seconds, above 0 and below 1e+09\n")


@needs_cluster
def test_who_reads_may_stop(cluster: Cluster) -> None:
    """As under ``| head -1``: a traceback for each rank, and one of the command itself."""
    for words in (["counters"], ["launch", "2", "seq", "100000"]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as nobody:
            environment = os.environ | {"RINGPRUNE_CLUSTER": str(cluster.folder)}
            line = [sys.executable, str(COMMAND), *words]
            done = subprocess.run(line, env=environment, stdout=nobody, stderr=subprocess.PIPE, timeout=60)
        assert done.stderr == b""


@needs_cluster
def test_ranks_may_write_letters_that_the_output_has_not(cluster: Cluster) -> None:
    """They were ended by a SIGPIPE, or what they wrote was lost and the status was 0."""
    words = [sys.executable, str(COMMAND), "launch", "1", "sh", "-c", "printf 'gr\\303\\266\\303\\237e\\n'; echo next"]
    environment = os.environ | {"RINGPRUNE_CLUSTER": str(cluster.folder), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0] gr\\xf6\\xdfe\n[0] next\n", done.stderr
