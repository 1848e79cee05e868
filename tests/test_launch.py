"""What the shell files of mpi_scripts/launch hand on; the launchers are stood in for, and say what they were given."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "mpi_scripts" / "launch"


def launched(
    hosts: str, tmp_path: Path, says: str = '"$@"', launcher: str = "horovodrun", **variables: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "hosts").write_bytes(hosts.encode())
    stand_in = tmp_path / launcher
    stand_in.write_text(f"#!/bin/sh\necho {says}\n")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **variables}
    command = ["sh", str(FOLDER / f"{launcher}.sh"), str(tmp_path / "hosts"), "python", "train.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "hosts",
    [
        "# ours\nnode1 slots=4\n\nnode2 slots=2\n",
        "node1\tslots=4\n  node2   slots=2 max_slots=8 # slots=9",
        "# ours\r\nnode1 slots=4\r\n\r\nnode2 slots=2\r\n",
    ],
)
def test_every_host_is_given_by_name(hosts: str, tmp_path: Path) -> None:
    """One behind a tab was left out, with its ranks counted all the same."""
    expected = "--mpi -np 6 -H node1:4,node2:2 --network-interfaces eth0 python train.py\n"
    assert launched(hosts, tmp_path).stdout == expected


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("node1\nnode2 slots=2\n", "node1 slots=4, not node1"),
        ("# none\n", "no host with slots"),
        ("node1 slots=0\n", "no host with slots"),
    ],
)
def test_a_host_without_slots_is_refused(hosts: str, says: str, tmp_path: Path) -> None:
    """It was left out, and the job ran on the others."""
    done = launched(hosts, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


@pytest.mark.parametrize(("variables", "interface"), [({"INTERFACE": "ib0"}, "ib0"), ({}, "eth0")])
def test_all_libraries_are_told_the_network(variables: dict[str, str], interface: str, tmp_path: Path) -> None:
    """Torch's Gloo was not: a host with a bridge of containers offered addresses that no other host reaches."""
    done = launched("node1 slots=2\n", tmp_path, says='"$7" "$GLOO_SOCKET_IFNAME"', **variables)
    assert done.stdout.split() == [interface, interface]


def test_mpirun_hands_on_what_is_horovods_and_the_interface_that_was_named(tmp_path: Path) -> None:
    """A variable with a digit in its name was left out, and HOROVOD_GLOO_IFACE went before INTERFACE."""
    variables = {"INTERFACE": "ib0", "HOROVOD_GLOO_IFACE": "eth9", "HOROVOD_MINE_2": "1"}
    words = launched("node1 slots=2\n", tmp_path, launcher="mpirun", **variables).stdout.split()
    handed = [after for word, after in itertools.pairwise(words) if word == "-x"]
    assert "HOROVOD_MINE_2" in handed
    assert [name for name in handed if name.startswith("HOROVOD_GLOO_IFACE")] == ["HOROVOD_GLOO_IFACE=ib0"]


def test_open_mpis_folder_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    """Its arguments for MPI go into a shell's line as they are: a checkout in such a folder did not start."""
    words = launched("node1 slots=2\n", tmp_path, says="\"$@\" | tr ' ' '\\n'", OPAL_PREFIX="/my home/openmpi").stdout
    assert "--mpi-args=--prefix\n'/my\nhome/openmpi'\n" in words


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
@pytest.mark.parametrize("words", [[], ["hosts"], ["--help"]])
def test_without_a_command_it_says_how(launcher: str, words: list[str]) -> None:
    """The shell said "1: parameter not set"."""
    done = subprocess.run(["sh", FOLDER / f"{launcher}.sh", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith(f"{launcher}.sh HOSTFILE COMMAND\n")
