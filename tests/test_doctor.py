"""The doctor tells what is there, what is missing and how to mend it, and starts nothing in its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringprune import __main__, doctor
from ringprune.doctor import Finding

HEALTHY: dict[str, dict[str, Any]] = {
    "torch": {"version": "2.13.0", "cuda": None, "devices": [], "built": {"Gloo": True, "NCCL": False}},
    "horovod": {"version": "0.28.1", "built": {"MPI": True, "Gloo": True, "NCCL": False}},
    "mpi": {"version": "4.1.2", "library": "Open MPI v4.1.8", "thread": "multiple"},
    "native": {"backend": "native", "build": "built for torch 2.13.0, threads OpenMP"},
    "numba": {"version": "0.68.1"},
}
GONE = {"trouble": "ModuleNotFoundError: gone"}


def findings(monkeypatch: pytest.MonkeyPatch, **answers: dict[str, Any]) -> dict[str, Finding]:
    """What the doctor makes of these answers of its probes."""
    told = {doctor.PROBES[name]: answer for name, answer in {**HEALTHY, **answers}.items()}
    monkeypatch.setattr(doctor, "_ask", told.__getitem__)
    return {finding.name: finding for finding in doctor.examine()}


def test_here_it_finds_torch_and_can_be_read_by_programs(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "ringprune", "doctor", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    told = json.loads(out.read_text())
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["torch"]["ok"]
    assert done.returncode == (0 if told["ready"] else 1)
    assert "torch" in done.stdout
    assert done.stderr == ""


def test_it_starts_neither_horovod_nor_mpi_in_its_own_process() -> None:
    code = (
        "import sys, ringprune.doctor as d; d.examine(); print([m for m in ('horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"


def test_a_healthy_machine_needs_no_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch)
    assert found["Horovod"].found == "0.28.1 (built with: MPI yes, Gloo yes, NCCL no)"
    assert found["MPI"].found == "Open MPI v4.1.8, threads: multiple (mpi4py 4.1.2)"
    assert found["torch.distributed"].found == "started by torchrun (built with: Gloo yes, NCCL no)"
    assert found["native CPU"].ok
    assert not found["native CUDA"].ok
    assert found["native CUDA"].mend == "", "without CUDA in torch there is nothing to mend"


@pytest.mark.parametrize(
    ("gone", "ready"),
    [
        ((), True),
        (("horovod",), True),
        (("mpi",), True),
        (("native", "numba"), True),
        (("horovod", "mpi"), True),
        (("torch",), False),
    ],
)
def test_training_needs_torch_and_something_that_carries_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone: tuple[str, ...], ready: bool
) -> None:
    found = findings(monkeypatch, **dict.fromkeys(gone, GONE))
    assert __main__.main(["doctor"]) == (0 if ready else 1)
    shown = capsys.readouterr().out
    assert ("Not ready" in shown) is not ready
    missing = [finding for finding in found.values() if finding.found == GONE["trouble"]]
    assert len(missing) == len(gone)
    assert all(finding.mend in shown and finding.mend for finding in missing)


def test_a_torch_without_distributed_needs_horovod_or_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {**HEALTHY["torch"], "built": {}}
    assert doctor.is_ready(list(findings(monkeypatch, torch=bare, horovod=GONE).values()))
    found = findings(monkeypatch, torch=bare, horovod=GONE, mpi=GONE)
    assert not doctor.is_ready(list(found.values()))
    assert found["torch.distributed"].mend == "pip install torch"


def test_a_torch_with_cuda_and_a_library_without_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"version": "2.13.0", "cuda": "13.0", "devices": ["H200"]}
    found = findings(monkeypatch, torch=cuda)
    assert "H200" in found["torch"].found
    assert found["native CUDA"].found.startswith("not built: operations on GPUs run in torch, slowly")
    assert "RINGPRUNE_BUILD=cuda pip install" in found["native CUDA"].mend
    built = {"backend": "native+cuda", "build": "built for torch 2.13.0", "refused": []}
    assert findings(monkeypatch, torch=cuda, native=built)["native CUDA"].ok


def test_open_mpi_s_wheel_is_told_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a launcher hvd.init() ended the process, with an error of ORTE, where the doctor had said "ready"."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "orted").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    found = findings(monkeypatch)["MPI"]
    assert "without mpirun or horovodrun" in found.found and found.mend == f'export OPAL_PREFIX="{tmp_path}"'
    monkeypatch.setenv("OPAL_PREFIX", str(tmp_path))
    assert findings(monkeypatch)["MPI"].mend == ""


def test_a_gpu_that_nothing_was_compiled_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "built", and training ended with "no kernel image is available" at the first op."""
    refused = [{"capability": "7.0", "why": "CUDA error: no kernel image is available for execution on the device"}]
    native = {"backend": "native+cuda", "build": "built for torch 2.13.0", "refused": refused}
    found = findings(monkeypatch, native=native)["native CUDA"]
    assert not found.ok
    assert "compute capability 7.0" in found.found and "no kernel image" in found.found
    assert found.mend.startswith("TORCH_CUDA_ARCH_LIST=7.0 RINGPRUNE_BUILD=cuda pip install")


def test_a_library_that_is_not_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(monkeypatch, native={"backend": "reference", "build": None})["native CPU"]
    assert not found.ok
    assert "pip install" in found.mend


def test_a_probe_looks_at_the_package_that_asks_wherever_it_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the source folder of an installed copy it found the sources, and that these had no native library."""
    (tmp_path / "ringprune").mkdir()
    (tmp_path / "ringprune" / "__init__.py").write_text("raise ImportError('another copy')")
    monkeypatch.chdir(tmp_path)
    found = doctor._ask("import json, ringprune; print(json.dumps({'at': ringprune.__file__}))")
    assert found == {"at": str(Path(doctor.__file__).with_name("__init__.py"))}


def test_a_launcher_that_is_not_on_the_path_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert doctor._launcher("mpirun", "load it").mend == "load it"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch()
    assert doctor._launcher("mpirun", "load it").mend.startswith("export PATH=")


@pytest.mark.parametrize(("release", "ok"), [("4.1.8", True), ("5.0.11", False)])
def test_horovodrun_is_not_said_to_work_where_it_cannot_start_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, ok: bool
) -> None:
    """Open MPI 5 took its ``-bind-to none`` for the program ``none``, and all had been found well."""
    for name, says in (("mpirun", f"mpirun (Open MPI) {release}"), ("horovodrun", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    found = doctor._horovodrun()
    assert found.ok is ok
    assert ("--gloo" in found.mend) is not ok


def test_a_probe_that_hangs_or_dies_ends_as_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hasty:  # not for those that answer: on a busy machine they may take so long
        hasty.setattr(doctor, "SECONDS", 1)
        assert doctor._ask("import time; time.sleep(60)") == {"trouble": "gave no answer within 1 s"}
    assert doctor._ask("import os; os._exit(7)") == {"trouble": "ended with status 7"}
    assert doctor._ask("import no_such_module")["trouble"].startswith("ModuleNotFoundError: No module named")
    assert doctor._ask("raise RuntimeError('no MPI library')")["trouble"] == "RuntimeError: no MPI library"


def test_a_probe_is_no_rank_of_the_job_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    kept = doctor._outside_of_jobs(os.environ)
    assert "OMPI_COMM_WORLD_RANK" not in kept
    assert "PMIX_RANK" not in kept
    assert kept["PATH"] == os.environ["PATH"]


def test_the_command_line_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 2
    assert "ringprune doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["docter"])
    assert "doctor" in capsys.readouterr().err
