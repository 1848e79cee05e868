"""The emulated cluster: its counters tell the truth, its rates are in force, and nothing is left of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_scripts.emulated_cluster import Cluster, ClusterArgumentError, ClusterError, Job, launch, mpirun, why_not_here
from mpi_scripts.emulated_cluster.command_line import main
from mpi_scripts.emulated_cluster.processes import Process, network_of, processes_inside
from tests.mpi.launch import ROOT, job_environment

COMMAND = ROOT / "mpi_scripts" / "cluster"
NOT_HERE = why_not_here()

needs_cluster = pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four hosts at 1 Gbit/s; the environment of this process is that of jobs meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job_environment(60).items():
            patch.setenv(name, value)
        with Cluster.temporary(4, "1gbit") as made:
            yield made


def run(cluster: Cluster, module: str, *arguments: str, timeout: float = 120, **options: str) -> Job:
    environment = {"RINGPRUNE_TEST_SECONDS": str(timeout - 5), **options}
    command = [sys.executable, "-m", module, *arguments]
    job = mpirun(cluster, 4, command, timeout=timeout, environment=environment, output="capture")
    assert job.returncode == 0, job.output
    return job


def sent(cluster: Cluster) -> list[int]:
    return [counters.tx_bytes for counters in cluster.counters().values()]


def command(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(COMMAND), *words],
        env=os.environ | {"RINGPRUNE_CLUSTER": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def network_devices() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout


def wait_until_gone(processes: list[Process]) -> None:
    limit = time.monotonic() + 40
    while any(process.alive for process in processes):
        assert time.monotonic() < limit, "holders live on"
        time.sleep(0.05)


# -- links ------------------------------------------------------------------------------------------------------------


@needs_cluster
@pytest.mark.ranks
def test_counters_see_what_is_sent(cluster: Cluster) -> None:
    """50 MB per rank; Open MPI's start and the headers are within 2 %."""
    before = sent(cluster)
    assert "transferred" in run(cluster, "tests.mpi.jobs.ring_transfer", "50").output
    for host, bytes_before, bytes_after in zip(cluster.hosts, before, sent(cluster), strict=True):
        assert 50e6 <= bytes_after - bytes_before <= 51e6, host.name


@needs_cluster
def test_rates_are_in_force(cluster: Cluster) -> None:
    try:
        assert set(cluster.configured_rates().values()) == {(1e9, 1e9)}
        cluster.rate("100mbit")
        cluster.rate("2.5gbit", host="h1", direction="up")
        cluster.rate("unlimited", host="h2")
        expected = {"h0": (1e8, 1e8), "h1": (2.5e9, 1e8), "h2": (None, None), "h3": (1e8, 1e8)}
        assert cluster.configured_rates() == expected
        assert Cluster(cluster.folder).configured_rates() == expected
        assert "2.5gbit" in command(cluster.folder, "status").stdout
    finally:
        cluster.rate("1gbit")


@needs_cluster
@pytest.mark.ranks
def test_a_transfer_survives_a_pulled_cable(cluster: Cluster) -> None:
    before = sent(cluster)
    jobs: list[Job] = []
    thread = threading.Thread(target=lambda: jobs.append(run(cluster, "tests.mpi.jobs.ring_transfer", "50")))
    thread.start()
    try:
        while sent(cluster)[2] - before[2] < 5_000_000 and thread.is_alive():
            time.sleep(0.01)
        cluster.plug("h2", connected=False)
        time.sleep(0.2)  # what was on its way has arrived
        received = cluster.counters()["h2"].rx_bytes
        time.sleep(0.3)
        assert cluster.counters()["h2"].rx_bytes == received, "bytes go around the cable"
    finally:
        cluster.plug("h2", connected=True)
        thread.join()
    assert "transferred" in jobs[0].output
    assert sent(cluster)[2] - before[2] >= 50_000_000


@needs_cluster
@pytest.mark.parametrize("rate", ["", "10", "fast", "-1mbit", "0mbit", "10kbit", "200gbit", "1 gbit", "1gbps"])
def test_rates_that_are_none(cluster: Cluster, rate: str) -> None:
    with pytest.raises(ClusterArgumentError, match=r"rate .*unlimited"):
        cluster.rate(rate)


@needs_cluster
def test_hosts_that_are_none(cluster: Cluster) -> None:
    with pytest.raises(ClusterArgumentError, match="no host 'h4': there are h0, h1, h2, h3, sw"):
        cluster.rate("1gbit", host="h4")
    with pytest.raises(ClusterArgumentError, match="'sw' is the switch"):
        cluster.plug("sw", connected=False)
    with pytest.raises(ClusterArgumentError, match="need 5 hosts: 4 are up"):
        launch(cluster, 5, ["true"])
    for words in (["up", "0", "1gbit"], ["exec", "h9", "true"], ["mpirun", "4", "-x", "A"], ["launch", "2"]):
        done = command(cluster.folder, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


# -- jobs -------------------------------------------------------------------------------------------------------------


@needs_cluster
def test_hosts_are_apart(cluster: Cluster) -> None:
    script = "hostname; ls /dev/shm | wc -l; touch /dev/shm/mine; ls /sys/class/net; getent hosts h1"
    done = command(cluster.folder, "exec", "h2", "--", "sh", "-c", script)
    assert done.stdout.split() == ["h2", "0", "eth0", "lo", "10.77.0.12", "h1"], done.stderr
    assert command(cluster.folder, "exec", "h3", "ls", "/dev/shm").stdout == ""


@needs_cluster
def test_launch_gives_ranks_and_tags_lines(cluster: Cluster) -> None:
    script = 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $(hostname) to $MASTER_ADDR"'
    job = launch(cluster, 5, ["sh", "-c", script], ranks_per_host=2, output="capture")
    assert job.returncode == 0
    assert sorted(job.output.splitlines()) == [
        "[0] 0 of 5, 0 of 2 on h0 to 10.77.0.11",
        "[1] 1 of 5, 1 of 2 on h0 to 10.77.0.11",
        "[2] 2 of 5, 0 of 2 on h1 to 10.77.0.11",
        "[3] 3 of 5, 1 of 2 on h1 to 10.77.0.11",
        "[4] 4 of 5, 0 of 1 on h2 to 10.77.0.11",
    ]


@needs_cluster
def test_launch_ends_as_a_whole(cluster: Cluster) -> None:
    """When one fails, and at the time limit, with what its processes have started."""
    waiting = "sleep 300 & sleep 300"
    failed = launch(cluster, 4, ["sh", "-c", f"[ $RANK != 2 ] || exit 7; {waiting}"], timeout=60, output="capture")
    assert failed.returncode == 7
    assert launch(cluster, 4, ["sh", "-c", waiting], timeout=1, output="capture").returncode == 124
    assert not cluster.processes()


@needs_cluster
@pytest.mark.ranks
def test_mpirun_ends_as_a_whole(cluster: Cluster) -> None:
    for limit in (4, 12, 36):
        job = mpirun(cluster, 4, ["sh", "-c", "hostname; sleep 300"], timeout=limit, output="capture")
        assert job.returncode == 124
        assert not cluster.processes()
        # Among what launchers may say: once, under load, the output began with a warning.
        if {"h0", "h1", "h2", "h3"} <= set(job.output.split()):
            break  # else it was ended before all ranks were there: on a busy machine that takes longer
    assert {"h0", "h1", "h2", "h3"} <= set(job.output.split()), job.output


# -- up and down ------------------------------------------------------------------------------------------------------


@needs_cluster
def test_down_leaves_nothing(tmp_path: Path) -> None:
    devices = network_devices()
    made = Cluster.up(2, "unlimited", folder=tmp_path / "one")
    with Cluster.temporary(2) as other:
        with pytest.raises(ClusterError, match=r"up in .* already"):
            Cluster.up(2, folder=made.folder)
        holders = [host.process for host in [*made.hosts, made.host("sw")]]
        networks = [network for holder in holders if (network := network_of(holder.pid))]
        words = [sys.executable, str(COMMAND)]
        with subprocess.Popen([*words, "exec", "h1", "sleep", "300"], env=_in(made.folder)) as sleeper:
            try:
                # It is on the host before it sleeps: a shell that changes the folder becomes the command.
                while not any(process.command == "sleep 300" for _, process in made.processes()):
                    assert sleeper.poll() is None
                    time.sleep(0.02)
                with pytest.raises(ClusterError, match=rf"h1: {sleeper.pid} \(.*sleep 300\)"):
                    made.down()
                assert command(made.folder, "down", "--kill").stdout == "down\n"
                assert sleeper.wait(10) == -signal.SIGTERM
            finally:
                sleeper.kill()
        assert not list(processes_inside(networks))
        assert not any(holder.alive for holder in holders)
        made.down()
        assert command(made.folder, "down").returncode == 0
        assert other.configured_rates() == {"h0": (1e9, 1e9), "h1": (1e9, 1e9)}
    assert command(made.folder, "counters").returncode == 1
    assert [path.name for path in made.folder.iterdir()] == ["lock"]
    assert network_devices() == devices


def _in(folder: Path) -> dict[str, str]:
    return os.environ | {"RINGPRUNE_CLUSTER": str(folder)}


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    state = tmp_path / "state.json"
    for _ in range(5):
        # What runs in the background of a shell inherits that SIGINT is ignored, and these tests may.
        hears = ["env", "--default-signal=INT"]
        up = [*hears, sys.executable, str(COMMAND), "up", "12", "1gbit"]
        with subprocess.Popen(up, env=_in(tmp_path)) as process:
            while not state.exists():
                assert process.poll() is None
                time.sleep(0.005)
            switch = json.loads(state.read_text())["switch"]["process"]
            process.send_signal(number)
            process.wait(60)
        # On a busy machine all of it, to the last rate, was up before the signal came, if only just.
        if not state.exists() or len(json.loads(state.read_text())["rates"]) < 12:
            break
        subprocess.run([sys.executable, str(COMMAND), "down"], env=_in(tmp_path), check=True)
    assert process.returncode == 128 + number
    assert not state.exists()
    assert not Process(**switch).alive


@needs_cluster
def test_a_temporary_cluster_ends_with_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import time; from mpi_scripts.emulated_cluster import Cluster\n"
        "with Cluster.temporary(2) as c: print(*[h.pid for h in c.hosts], flush=True); time.sleep(60)"
    )
    there = os.environ | {"TMPDIR": str(tmp_path)}  # its folder stays
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=there, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        holders = [found for pid in owner.stdout.readline().split() if (found := Process.of(int(pid)))]
        assert len(holders) == 2
        owner.kill()
    wait_until_gone(holders)


@needs_cluster
def test_a_sigterm_ends_a_temporary_cluster_and_its_job() -> None:
    """A replay that was told to stop left its mpirun behind, on a cluster that was gone."""
    script = (
        "from mpi_scripts.emulated_cluster import Cluster, launch\n"
        "with Cluster.temporary(2) as c:\n"
        "    launch(c, 2, ['bash', '-c', 'echo $$; exec sleep 60'], output='inherit')"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        job = [found for _ in range(2) if (found := Process.of(int(owner.stdout.readline())))]
        assert len(job) == 2
        owner.terminate()
        assert owner.wait(30) == 128 + signal.SIGTERM
    assert not any(process.alive for process in job)


@needs_cluster
def test_hosts_end_by_themselves_and_leave_a_stale_state(tmp_path: Path) -> None:
    for ttl in (1, 4, 16):
        try:
            made = Cluster.up(2, "1gbit", folder=tmp_path, ttl=ttl)
            break
        except ClusterError:  # on a busy machine the first may end before the last is made
            if ttl == 16:
                raise
    wait_until_gone([host.process for host in [*made.hosts, made.host("sw")]])
    done = command(tmp_path, "status")
    assert done.returncode == 1
    assert re.search(r"is gone \(h0, h1, sw\).*`cluster down` clears it away", done.stderr)
    with Cluster.up(1, "1gbit", folder=tmp_path, tied=True) as again:
        assert len(again.hosts) == 1


@needs_cluster
def test_a_state_from_before_the_machine_was_started_again(tmp_path: Path) -> None:
    """Its numbers of processes are those of others now: nobody is ended."""
    with Cluster.up(1, folder=tmp_path) as made:
        kept = (tmp_path / "state.json").read_text()
        (tmp_path / "state.json").write_text(re.sub(r'"boot": "[^"]+"', '"boot": "another"', kept))
        assert "is gone" in command(tmp_path, "rate", "1gbit").stderr
        assert command(tmp_path, "down").stdout == "down\n"
        assert made.hosts[0].up
        (tmp_path / "state.json").write_text(kept)


def test_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Status 3 and one line; callers skip."""
    monkeypatch.setenv("RINGPRUNE_CLUSTER", str(tmp_path / "none"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["up", "2", "1gbit"]) == 3
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up", "2", "1gbit"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert "needs root" in first
    assert "needs ip, tc, nsenter, unshare, setsid, mount on PATH: install iproute2 util-linux mount" in second
    assert not (tmp_path / "none").exists()


# -- what RingPrune says it sends -------------------------------------------------------------------------------------


@needs_cluster
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute; on a busy machine it took three
@pytest.mark.parametrize("kind", ["mpi", "horovod"])
def test_bytes_sent_are_bytes_on_the_interface(cluster: Cluster, kind: str) -> None:
    """Nine million weights at 1 %: messages of 360 kB, so that 2 % are enough for headers and acknowledgements.

    Horovod's ranks ask each other every HOROVOD_CYCLE_TIME milliseconds what is ready, whether they train or not; at
    the default of 1 that is 0.14 MB per second and host, which grows with the time that a busy machine takes.
    """
    if kind == "horovod":
        pytest.importorskip("horovod")
    job = run(cluster, "tests.mpi.jobs.accounting", kind, "3000", "24", timeout=500, HOROVOD_CYCLE_TIME="20")
    found = re.search(r"counted=(\d+) interface=(\d+)", job.output)
    assert found, job.output
    counted, on_interface = int(found[1]), int(found[2])
    assert counted > 24 * 0.75 * (2 * 4 + 1) * 90_000, "fewer bytes than 24 steps of values and indices have"
    assert counted <= on_interface <= 1.02 * counted
